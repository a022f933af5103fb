#include "runtime/watch/operator_run.h"

#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_map>

namespace fold3d::runtime {
namespace {

std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {  // the finalizer of splitmix64
  std::uint64_t x = a * 0x9e3779b97f4a7c15ULL + b;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

std::uint64_t hash_of(std::string_view text) {  // FNV-1a: std::hash is another one in another process
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char letter : text) hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3ULL;
  return hash;
}

constexpr std::array kProducts{
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "mv", "_grouped_mm", "scaled_dot_product_attention"};
constexpr std::array kRandom{"dropout",   "native_dropout", "feature_dropout", "alpha_dropout", "bernoulli",
                             "uniform_",  "normal_",        "randint",         "rand",          "randn",
                             "rand_like", "randn_like",     "dropout_",        "bernoulli_",    "feature_dropout_"};
/// They compute nothing, and activation checkpoints, which come and go, call them.
constexpr std::array kNothing{"empty", "empty_like", "detach", "alias"};
constexpr std::array kDimensions{"dim",       "dims",    "dim0",    "dim1",     "dimension",
                                 "start_dim", "end_dim", "keepdim", "equation", "descending"};

template <typename Names>
bool is_among(const Names& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

const std::uint64_t kProduct = hash_of("product");

struct Operator {
  std::uint64_t hash = 0;  ///< 0: left out
  std::string name;
  std::vector<std::size_t> dimensions;  ///< arguments that say in which dimensions it computes
};

Operator described(const at::RecordFunction& call) {
  const auto schema = call.operator_schema();
  std::string_view name = schema->name();
  Operator found;
  found.name = std::string(name);
  if (name.substr(0, 8) == "fold3d::") return found;
  const bool is_torchs = name.substr(0, 6) == "aten::";
  if (is_torchs) name.remove_prefix(6);
  if (is_torchs && (is_among(kRandom, name) || is_among(kNothing, name))) return found;
  if (is_torchs && is_among(kProducts, name)) {
    found.hash = kProduct;
    return found;
  }
  found.hash = hash_of(found.name + "." + schema->overload_name());
  const auto& arguments = schema->arguments();
  for (std::size_t place = 0; place < arguments.size(); ++place) {
    if (is_among(kDimensions, arguments[place].name())) found.dimensions.push_back(place);
  }
  return found;
}

std::uint64_t hash_of(const c10::IValue& value) {
  if (value.isInt()) return static_cast<std::uint64_t>(value.toInt());
  if (value.isBool()) return value.toBool() ? 2 : 3;
  if (value.isString()) return hash_of(value.toStringView());
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

std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& call) {
  OperatorRun* const run = t_run.get();
  if (run == nullptr) return nullptr;
  ++run->level;
  if (run->outermost != 0) return nullptr;
  const char* const key = call.overload_name();
  if (key == of_functions()) return nullptr;
  run->outermost = run->level;
  if (run->paused) return nullptr;
  auto found = t_operators.find(key);
  if (found == t_operators.end()) found = t_operators.emplace(key, described(call)).first;
  const Operator& op = found->second;
  if (op.hash == 0) return nullptr;
  std::uint64_t hash = op.hash;
  const auto inputs = call.inputs();
  for (const std::size_t place : op.dimensions) {
    if (place < inputs.size()) hash = mixed(hash, hash_of(inputs[place]));
  }
  run->ran(hash, op.name.c_str());
  return nullptr;
}

void ends(const at::RecordFunction&, at::ObserverContext*) {
  OperatorRun* const run = t_run.get();
  if (run == nullptr || run->level == 0) return;
  if (run->outermost == run->level) run->outermost = 0;
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

void OperatorRun::ran(std::uint64_t op, const char* name) {
  const std::uint64_t sequence = mixed(mixed(before_, last_), op) >> 1;  // fits into Python's ints and JSON's
  before_ = last_;
  last_ = op;
  if (!known_->contains(sequence) && noted_.add(sequence)) unknown_.emplace_back(sequence, name);
}

std::shared_ptr<OperatorRun> swap_operator_run(std::shared_ptr<OperatorRun> run) {
  if (run != nullptr && t_callback == at::INVALID_CALLBACK_HANDLE) {
    t_callback = at::addThreadLocalCallback(
        at::RecordFunctionCallback(begins, ends).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
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

void note_product() {
  if (t_run != nullptr && !t_run->paused) t_run->ran(kProduct, "a product of matrices");
}

}  // namespace fold3d::runtime
