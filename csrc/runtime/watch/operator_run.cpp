#include "runtime/watch/operator_run.h"

#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_map>

namespace fold3d::runtime {
namespace {

constexpr std::array kProducts{
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "mv", "_grouped_mm", "scaled_dot_product_attention"};
constexpr std::array kRandom{"dropout",   "native_dropout", "feature_dropout", "alpha_dropout", "bernoulli",
                             "uniform_",  "normal_",        "randint",         "rand",          "randn",
                             "rand_like", "randn_like",     "dropout_",        "bernoulli_",    "feature_dropout_"};
/// They compute nothing, and come and go: activation checkpoints call them, strides decide whether they are called.
constexpr std::array kNothing{"empty", "empty_like", "detach", "alias", "contiguous"};
/// They return what they were given, or a copy or a cast of it; which, depends on types.
constexpr std::array kSame{"to", "_to_copy", "type_as", "clone"};
constexpr std::array kDimensions{"dim",       "dims",    "dim0",    "dim1",     "dimension",
                                 "start_dim", "end_dim", "keepdim", "equation", "descending"};

template <typename Names>
bool is_among(const Names& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

const std::uint64_t kProduct = number_of("product");
constexpr std::size_t kFactors = 3;  // of a product, what is added among them; masks may come and go

struct Operator {
  std::uint64_t hash = 0;  ///< 0: left out
  std::string name;
  std::vector<std::size_t> dimensions;  ///< arguments that say in which dimensions it computes
  std::vector<std::size_t> tensors;     ///< arguments that are tensors, or lists of tensors
  bool makes = true;                    ///< whether what it returns comes from it, not from its first argument
  bool writes = false;                  ///< whether it writes to an argument
};

bool is_tensor(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::TensorType) return true;
  const bool holds = type->kind() == c10::TypeKind::OptionalType || type->kind() == c10::TypeKind::ListType;
  return holds && is_tensor(type->containedType(0));
}

Operator described(const at::RecordFunction& call) {
  const auto schema = call.operator_schema();
  std::string_view name = schema->name();
  Operator found;
  found.name = std::string(name);
  const auto& arguments = schema->arguments();
  for (std::size_t place = 0; place < arguments.size(); ++place) {
    const auto& argument = arguments[place];
    const auto* alias = argument.alias_info();
    if (alias != nullptr && alias->isWrite()) found.writes = true;
    if (is_among(kDimensions, argument.name())) found.dimensions.push_back(place);
    if (!argument.is_out() && is_tensor(argument.type())) found.tensors.push_back(place);
  }
  const bool is_torchs = name.substr(0, 6) == "aten::";
  if (is_torchs) name.remove_prefix(6);
  const bool is_left_out = is_torchs && (is_among(kRandom, name) || is_among(kNothing, name));
  if (is_left_out || name.substr(0, 8) == "fold3d::") {
    found.makes = false;
    return found;
  }
  if (is_torchs && is_among(kProducts, name)) {
    found.hash = kProduct;
    found.dimensions.clear();
    return found;
  }
  found.makes = !(is_torchs && is_among(kSame, name));
  found.hash = number_of(found.name + "." + schema->overload_name());
  return found;
}

std::uint64_t hash_of(const c10::IValue& value) {
  if (value.isInt()) return static_cast<std::uint64_t>(value.toInt());
  if (value.isBool()) return value.toBool() ? 2 : 3;
  if (value.isString()) return number_of(value.toStringView());
  std::uint64_t hash = 1;
  if (value.isIntList()) {
    for (const std::int64_t one : value.toDimVector()) hash = mixed(hash, static_cast<std::uint64_t>(one));
  }
  return hash;
}

thread_local std::shared_ptr<OperatorRun> t_run;
thread_local at::CallbackHandle t_callback = at::INVALID_CALLBACK_HANDLE;

/// By the address of the text of its overload, which lies in its schema.
thread_local std::unordered_map<const char*, Operator> t_operators;

const char* of_functions() {  // autograd's own functions have no schema; what they call counts
  static const char* const text = at::RecordFunction(at::StepCallbacks()).overload_name();
  return text;
}

/// Returns the origin of the first tensor of which one is known.
std::optional<Origin> first_origin(const Origins& origins, const Operator& op,
                                   c10::ArrayRef<const c10::IValue> inputs) {
  for (const std::size_t place : op.tensors) {
    if (place >= inputs.size()) continue;
    const c10::IValue& input = inputs[place];
    if (input.isTensor() && origins.knows(input.toTensor())) return origins.of(input.toTensor());
    if (!input.isList()) continue;
    for (const c10::IValue& one : input.toListRef()) {
      if (one.isTensor() && origins.knows(one.toTensor())) return origins.of(one.toTensor());
    }
  }
  return std::nullopt;
}

Operands operands_of(const Origins& origins, std::uint64_t hash, const Operator& op,
                     c10::ArrayRef<const c10::IValue> inputs) {
  const bool is_product = hash == kProduct;
  Operands operands(origins, hash, !is_product);
  std::size_t count = 0;
  for (const std::size_t place : op.tensors) {
    if (place >= inputs.size() || (is_product && count == kFactors)) break;
    const c10::IValue& input = inputs[place];
    if (input.isTensor()) {
      operands.add(input.toTensor(), place);
      ++count;
    } else if (input.isList()) {
      operands.add(input.toListRef(), place);
    }
  }
  return operands;
}

void put(OperatorRun& run, const at::Tensor& made, std::uint64_t index) {
  // What an operator returns as it was given stays what it is: a dropout may be off, say.
  if (!made.defined() || (!run.results->writes && run.origins.knows(made))) return;
  run.origins.set(made, run.results->differ ? run.results->origin.of_result(index) : run.results->origin);
}

std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& call) {
  OperatorRun* const run = t_run.get();
  if (run == nullptr) return nullptr;
  ++run->level;
  if (run->outermost != 0) return nullptr;
  const char* const key = call.overload_name();
  if (key == of_functions()) return nullptr;
  run->outermost = run->level;
  auto found = t_operators.find(key);
  if (found == t_operators.end()) found = t_operators.emplace(key, described(call)).first;
  const Operator& op = found->second;
  const auto inputs = call.inputs();
  run->results.reset();
  if (run->paused || !op.makes) {
    if (const auto origin = first_origin(run->origins, op, inputs)) run->results = Results{*origin, false, op.writes};
  }
  if (run->paused || op.hash == 0) return nullptr;
  std::uint64_t hash = op.hash;
  for (const std::size_t place : op.dimensions) {
    if (place < inputs.size()) hash = mixed(hash, hash_of(inputs[place]));
  }
  std::uint64_t sources = 0;
  if (op.makes) {
    const Operands operands = operands_of(run->origins, hash, op, inputs);
    run->results = Results{operands.origin(), true, op.writes};
    sources = operands.sources();
  }
  run->ran(hash, sources, op.name.c_str());
  return nullptr;
}

void ends(const at::RecordFunction& call, at::ObserverContext*) {
  OperatorRun* const run = t_run.get();
  if (run == nullptr || run->level == 0) return;
  if (run->outermost == run->level) {
    run->outermost = 0;
    if (run->results.has_value()) {
      std::uint64_t index = 0;
      for (const c10::IValue& output : call.outputs()) {
        if (output.isTensor()) {
          put(*run, output.toTensor(), index++);
        } else if (output.isTensorList()) {
          for (const c10::IValue& one : output.toListRef()) put(*run, one.toTensor(), index++);
        }
      }
    }
  }
  --run->level;
}

}  // namespace

bool NumberSet::contains(std::uint64_t number) const {
  const std::size_t mask = slots_.size() - 1;
  for (std::size_t slot = number & mask; slots_[slot] != 0; slot = (slot + 1) & mask) {
    if (slots_[slot] == number) return true;
  }
  return false;
}

bool NumberSet::add(std::uint64_t number) {
  if (number == 0 || contains(number)) return false;
  if (2 * ++count_ > slots_.size()) {
    std::vector<std::uint64_t> before(2 * slots_.size(), 0);
    before.swap(slots_);
    count_ = 1;
    for (const std::uint64_t one : before) add(one);
  }
  const std::size_t mask = slots_.size() - 1;
  std::size_t slot = number & mask;
  while (slots_[slot] != 0) slot = (slot + 1) & mask;
  slots_[slot] = number;
  return true;
}

void OperatorRun::given(const at::Tensor& tensor, std::uint64_t name, unsigned bit) {
  if (tensor.defined() && !origins.knows(tensor)) origins.set(tensor, {name, name, std::uint64_t{1} << bit});
}

void OperatorRun::ran(std::uint64_t op, std::uint64_t sources, const char* name) {
  const std::uint64_t sequence = mixed(mixed(before_, last_), op);
  before_ = last_;
  last_ = op;
  const bool is_new = note(sequence, name, "");
  if (sources != 0) note(sources, name, is_new ? "" : " of other tensors");
}

bool OperatorRun::note(std::uint64_t number, const char* name, const char* what) {
  number >>= 1;  // fits into Python's ints and JSON's
  if (known_->contains(number)) return false;
  if (noted_.add(number)) unknown_.emplace_back(number, std::string(name) + what);
  return true;
}

std::shared_ptr<OperatorRun> swap_operator_run(std::shared_ptr<OperatorRun> run) {
  if (run != nullptr && t_callback == at::INVALID_CALLBACK_HANDLE) {
    t_callback = at::addThreadLocalCallback(at::RecordFunctionCallback(begins, ends)
                                                .needsInputs(true)
                                                .needsOutputs(true)
                                                .scopes({at::RecordScope::FUNCTION}));
  } else if (run == nullptr && t_callback != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(t_callback);
    t_callback = at::INVALID_CALLBACK_HANDLE;
  }
  t_run.swap(run);
  return run;
}

bool pause_operators(bool pauses) {
  if (t_run != nullptr) std::swap(t_run->paused, pauses);
  return pauses;
}

void note_product(const at::Tensor& result, const std::vector<std::optional<at::Tensor>>& operands) {
  OperatorRun* const run = t_run.get();
  if (run == nullptr) return;
  Operands factors(run->origins, kProduct, false);
  std::size_t count = 0;
  for (const auto& one : operands) {
    if (one.has_value() && one->defined() && count++ < kFactors) factors.add(*one, 0);
  }
  if (!run->paused) run->ran(kProduct, factors.sources(), "a product of matrices");
  run->origins.set(result, factors.origin().of_result(0));
}

void same_origin(const at::Tensor& result, const at::Tensor& source) {
  OperatorRun* const run = t_run.get();
  if (run != nullptr && run->origins.knows(source)) run->origins.set(result, Origin(run->origins.of(source)));
}

}  // namespace fold3d::runtime
