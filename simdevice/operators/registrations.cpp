#include "simdevice/operators/registrations.h"

#include <torch/library.h>

#include <set>
#include <string>

#include "simdevice/operators/fallback.h"

namespace simdevice {

namespace {

const std::set<std::string> kOfTorch{"copy_", "_fused_sdp_choice", "set_"};

bool takes_tensors(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    if (argument.type()->str().find("Tensor") != std::string::npos) return true;
  }
  return false;
}

bool returns_views(const c10::FunctionSchema& schema) {
  for (const auto& value : schema.returns()) {
    if (value.alias_info() != nullptr && !value.alias_info()->isWrite()) return true;
  }
  return false;
}

bool takes_generator(const c10::FunctionSchema& schema) {
  return schema.argumentIndexWithName("generator").has_value();
}

}  // namespace

int register_operators() {
  static auto& library =
      *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  int count = 0;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CPU)) {
    if (name.getNamespace() != "aten") continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    const auto& schema = op->schema();
    if (returns_views(schema) || op->hasTag(at::Tag::inplace_view) || !takes_tensors(schema)) continue;
    if (op->hasTag(at::Tag::nondeterministic_seeded) && !takes_generator(schema)) continue;
    std::string local = name.name.substr(std::string("aten::").size());
    if (!name.overload_name.empty()) local += "." + name.overload_name;
    if (kOfTorch.count(local) > 0) continue;
    library.impl(local.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_stream>());
    ++count;
  }
  return count;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_stream>());
}

}  // namespace simdevice
