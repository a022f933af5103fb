#include "simdevice/operators/geometry.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/DefaultDtype.h>

#include <bit>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace simdevice {

namespace {

using Key = std::vector<std::int64_t>;

/// Of one operator, how many are kept: a program with so many different sizes has no use for them.
constexpr std::size_t kMostKept = 4096;

/// What each part of a key begins with, so that none can be taken for another.
enum Part : std::int64_t {
  kUndefined = -20,
  kTensor,
  kNone,
  kInt,
  kBool,
  kDouble,
  kDevice,
  kString,
  kInts,
  kList,
  kBools
};

void add_tensor(Key& key, const at::Tensor& tensor) {
  if (!tensor.defined()) return key.push_back(kUndefined);
  key.insert(key.end(), {kTensor, tensor.dim(), static_cast<std::int64_t>(tensor.scalar_type()),
                         tensor.unsafeGetTensorImpl()->is_wrapped_number(), tensor.is_cpu(), tensor.is_conj()});
  key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
  key.insert(key.end(), tensor.strides().begin(), tensor.strides().end());
}

/// Returns false for a value that no key is made of.
bool add_value(Key& key, const c10::IValue& value) {
  if (value.isTensor()) {
    add_tensor(key, value.toTensor());
  } else if (value.isNone()) {
    key.push_back(kNone);
  } else if (value.isInt()) {
    key.insert(key.end(), {kInt, value.toInt()});
  } else if (value.isBool()) {
    key.insert(key.end(), {kBool, value.toBool()});
  } else if (value.isDouble()) {
    key.insert(key.end(), {kDouble, std::bit_cast<std::int64_t>(value.toDouble())});
  } else if (value.isDevice()) {
    key.push_back(kDevice);
  } else if (value.isString()) {
    const std::string& text = value.toStringRef();
    key.insert(key.end(), {kString, static_cast<std::int64_t>(text.size())});
    key.insert(key.end(), text.begin(), text.end());
  } else if (value.isIntList()) {
    const auto ints = value.toIntVector();
    key.insert(key.end(), {kInts, static_cast<std::int64_t>(ints.size())});
    key.insert(key.end(), ints.begin(), ints.end());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    const auto list = value.toListRef();
    key.insert(key.end(), {kList, static_cast<std::int64_t>(list.size())});
    for (const c10::IValue& one : list) add_value(key, one);
  } else if (value.isBoolList()) {
    const auto bools = value.toBoolList();
    key.insert(key.end(), {kBools, static_cast<std::int64_t>(bools.size())});
    for (const bool one : bools) key.push_back(one);
  } else {
    return false;
  }
  return true;
}

at::Tensor on_meta(const at::Tensor& tensor) {
  if (tensor.is_cpu() && tensor.dim() == 0) return tensor;
  at::Tensor out = at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) out.unsafeGetTensorImpl()->set_wrapped_number(true);
  return out;
}

Geometry::Value value_of(const c10::IValue& result) {
  Geometry::Value value;
  if (result.isTensorList()) value.kind = Geometry::Kind::kList;
  if (result.isTensor() && result.toTensor().defined()) value.kind = Geometry::Kind::kTensor;
  each_tensor(result, [&](const at::Tensor& tensor) {
    value.tensors.push_back({tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()});
  });
  return value;
}

/// Of one operator.
struct Kept {
  bool has_no_meta = false;
  std::map<Key, std::shared_ptr<const Geometry>> found;
};

std::mutex kept_mutex;
std::map<const OperatorFacts*, Kept>& kept() {
  static auto& all = *new std::map<const OperatorFacts*, Kept>;
  return all;
}

/// The dtype of mean and deviation: the CPU's kernels keep them in that of the input where weights have it, too; meta
/// kernels always have them in float32 as CUDA's do.
at::ScalarType dtype_of_statistics(const c10::IValue* arguments, std::size_t count) {
  const at::ScalarType own = arguments[0].toTensor().scalar_type();
  bool is_mixed = false;
  for (std::size_t i = 1; i < count; ++i) {
    each_tensor(arguments[i], [&](const at::Tensor& tensor) { is_mixed |= tensor.scalar_type() != own; });
  }
  return is_mixed ? at::kFloat : own;
}

/// Runs the meta kernel. Throws what it throws.
std::shared_ptr<const Geometry> compute(const c10::OperatorHandle& op, const OperatorFacts& facts,
                                        const c10::IValue* arguments) {
  torch::jit::Stack stack;
  std::vector<at::Tensor> written;
  for (std::size_t i = 0; i < facts.writes.size(); ++i) {
    if (arguments[i].isDevice()) {
      stack.emplace_back(c10::Device(c10::kMeta));
    } else if (static_cast<int>(i) == facts.generator) {
      stack.emplace_back();
    } else {
      stack.push_back(map_tensors(arguments[i], on_meta));
    }
    if (facts.writes[i]) each_tensor(stack.back(), [&](const at::Tensor& tensor) { written.push_back(tensor); });
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  auto geometry = std::make_shared<Geometry>();
  bool is_meta = true;
  for (std::size_t i = 0; i < stack.size(); ++i) {
    each_tensor(stack[i], [&](const at::Tensor& tensor) { is_meta &= tensor.is_meta(); });
    geometry->returns.push_back(value_of(stack[i]));
  }
  if (facts.has_statistics && is_meta) {
    const at::ScalarType dtype = dtype_of_statistics(arguments, facts.writes.size());
    for (std::size_t i = 1; i < geometry->returns.size(); ++i) {
      for (auto& tensor : geometry->returns[i].tensors) tensor.dtype = dtype;
    }
  }
  for (const at::Tensor& tensor : written) geometry->written.push_back(tensor.sizes().vec());
  return is_meta ? geometry : nullptr;
}

}  // namespace

std::shared_ptr<const Geometry> geometry_of(const c10::OperatorHandle& op, const OperatorFacts& facts,
                                            const c10::IValue* arguments) {
  if (facts.has_wrong_meta || facts.returns_numbers) return nullptr;
  // Of integers that are divided, for one, the result has the default dtype, which programs change.
  Key key{static_cast<std::int64_t>(c10::get_default_dtype_as_scalartype())};
  bool has_key = true;
  for (std::size_t i = 0; i < facts.writes.size() && has_key; ++i) {
    if (static_cast<int>(i) != facts.generator) has_key = add_value(key, arguments[i]);
  }
  {
    const std::lock_guard lock(kept_mutex);
    Kept& known = kept()[&facts];
    if (known.has_no_meta) return nullptr;
    const auto found = known.found.find(key);
    if (has_key && found != known.found.end()) return found->second;
  }
  std::shared_ptr<const Geometry> geometry;
  bool has_no_meta = false;
  try {
    geometry = compute(op, facts, arguments);
  } catch (const c10::NotImplementedError&) {
    has_no_meta = true;
  } catch (const std::exception&) {
    return nullptr;
  }
  const std::lock_guard lock(kept_mutex);
  Kept& known = kept()[&facts];
  known.has_no_meta |= has_no_meta;
  if (has_key && known.found.size() < kMostKept) known.found.emplace(std::move(key), geometry);
  return geometry;
}

}  // namespace simdevice
