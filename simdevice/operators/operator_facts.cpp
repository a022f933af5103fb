#include "simdevice/operators/operator_facts.h"

#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>

namespace simdevice {

namespace {

const std::set<std::string> kWrongMeta{"aten::_embedding_bag",
                                       "aten::_embedding_bag_forward_only",
                                       "aten::native_batch_norm",
                                       "aten::_native_batch_norm_legit",
                                       "aten::_native_batch_norm_legit.no_stats",
                                       "aten::_native_batch_norm_legit_no_training",
                                       "aten::cudnn_batch_norm"};
const std::set<std::string> kHasStatistics{"aten::native_layer_norm", "aten::native_group_norm"};
const std::set<std::string> kTakesHostTensors{"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_",
                                              "aten::_pack_padded_sequence"};

OperatorFacts read(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto& name = op.operator_name();
  OperatorFacts facts;
  facts.name = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
  facts.has_wrong_meta = kWrongMeta.count(facts.name) > 0;
  facts.has_statistics = kHasStatistics.count(facts.name) > 0;
  facts.takes_host_tensors = kTakesHostTensors.count(facts.name) > 0;
  facts.has_cpu_kernel = op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  facts.is_random = op.hasTag(at::Tag::nondeterministic_seeded);
  const auto& arguments = schema.arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    facts.writes.push_back(alias != nullptr && alias->isWrite());
    facts.has_out |= arguments[i].is_out();
    if (arguments[i].name() == "generator") facts.generator = static_cast<int>(i);
  }
  for (const auto& value : schema.returns()) {
    int from = -1;
    if (const auto* alias = value.alias_info()) {
      facts.is_view |= !alias->isWrite();
      for (std::size_t i = 0; i < arguments.size() && from < 0; ++i) {
        const auto* other = arguments[i].alias_info();
        if (alias->isWrite() && other != nullptr && *other == *alias) from = static_cast<int>(i);
      }
    }
    facts.returned.push_back(from);
    const auto kind = value.type()->kind();
    facts.returns_numbers |= from < 0 && kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType;
  }
  return facts;
}

}  // namespace

const OperatorFacts& facts_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto& all = *new std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<OperatorFacts>>;
  const std::lock_guard lock(mutex);
  auto& found = all[&op.schema()];
  if (!found) found = std::make_unique<OperatorFacts>(read(op));
  return *found;
}

}  // namespace simdevice
