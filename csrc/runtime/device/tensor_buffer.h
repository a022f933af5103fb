// TensorBuffer: an at::Tensor as the torch-free communicator sees it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>

#include "comm/base/tensor.h"
#include "runtime/device/device.h"

namespace fold3d::runtime {

/// Memory of one contiguous tensor. `ready` marks, on the producing stream, when its contents are valid.
class TensorBuffer : public comm::Buffer {
 public:
  explicit TensorBuffer(at::Tensor tensor) : tensor_(std::move(tensor)) {}

  std::size_t bytes() const override { return tensor_.defined() ? tensor_.nbytes() : 0; }
  std::byte* host_data() override {
    return tensor_.is_cpu() ? static_cast<std::byte*>(tensor_.mutable_data_ptr()) : nullptr;
  }

  const at::Tensor& tensor() const { return tensor_; }
  DeviceEvent& ready() { return ready_; }

 protected:
  void let_go() { tensor_ = at::Tensor(); }

 private:
  at::Tensor tensor_;
  DeviceEvent ready_;
};

/// Describes and wraps `tensor` for sending: detached, contiguous, marked ready on the calling thread's stream.
comm::Tensor wrap(const at::Tensor& tensor);

/// The received tensor, sharing the buffer's memory; the buffer goes back to its pool when the tensor is freed.
/// A floating-point tensor whose sender tracks gradients becomes a leaf that requires them.
at::Tensor unwrap(const comm::Tensor& received);

}  // namespace fold3d::runtime
