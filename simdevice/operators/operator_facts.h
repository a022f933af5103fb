#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace simdevice {

/// What an operator's schema says.
struct OperatorFacts {
  std::string name;
  std::vector<bool> writes;   // of each argument
  std::vector<int> returned;  // of each return value: the argument that it is; -1: new
  int generator = -1;         // which argument; -1: none
  bool is_random = false;
  bool is_view = false;  // returns views of its arguments
  bool has_out = false;  // arguments that are written to take the results' sizes
  bool has_cpu_kernel = false;
  bool returns_numbers = false;     // what only a kernel that has run knows
  bool takes_host_tensors = false;  // also CUDA's kernel takes some on the host that are no scalars
  bool has_statistics = false;      // its results after the first are mean and deviation of its input
  bool has_wrong_meta = false;      // its meta kernel and its CPU kernel return different sizes
};

/// Of an operator; computed once. Thread-safe.
const OperatorFacts& facts_of(const c10::OperatorHandle& op);

/// The value with each tensor in it, also those in lists, replaced by f(tensor); undefined ones stay.
template <class F>
c10::IValue map_tensors(const c10::IValue& value, F f) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& tensor : value.toTensorVector()) out.push_back(tensor.defined() ? f(tensor) : tensor);
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      out.push_back(tensor.has_value() && tensor->defined() ? std::optional<at::Tensor>(f(*tensor)) : tensor);
    }
    return out;
  }
  return value;
}

/// Calls f(tensor) for each defined one in the value.
template <class F>
void each_tensor(const c10::IValue& value, F f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) f(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (tensor.defined()) f(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor.has_value() && tensor->defined()) f(*tensor);
    }
  }
}

}  // namespace simdevice
