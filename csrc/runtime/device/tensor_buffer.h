// TensorBuffer: an at::Tensor as the torch-free communicator sees it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <utility>

#include "comm/base/tensor.h"
#include "runtime/device/device.h"

namespace fold3d::runtime {

/// Memory of one contiguous tensor. `ready` marks, on the producing stream, when its contents are valid; `gathered`,
/// when those of all replicas are there; `reusable`, on the stream of those who used it, when it may be written to.
class TensorBuffer : public comm::Buffer {
 public:
  explicit TensorBuffer(at::Tensor tensor) : tensor_(std::move(tensor)) {}

  std::size_t bytes() const override { return tensor_.defined() ? tensor_.nbytes() : 0; }
  std::byte* host_data() override {
    return tensor_.is_cpu() ? static_cast<std::byte*>(tensor_.mutable_data_ptr()) : nullptr;
  }

  const at::Tensor& tensor() const { return tensor_; }
  DeviceEvent& ready() { return ready_; }
  DeviceEvent& gathered() { return gathered_; }
  DeviceEvent& reusable() { return reusable_; }

  /// `stream` is about to overwrite it: it waits for who wrote and who read it.
  void overwrite_on(const c10::Stream& stream) const {
    ready_.block(stream);
    reusable_.block(stream);
  }

  /// `stream` is about to use it, and nobody else will before it comes back: it waits until the contents are there.
  void use_on(const c10::Stream& stream) {
    ready_.block(stream);
    user_ = stream;
  }

  void returns() override {
    if (user_) reusable_.record(*user_);
    user_.reset();
  }

 protected:
  void let_go() { tensor_ = at::Tensor(); }

 private:
  at::Tensor tensor_;
  DeviceEvent ready_, gathered_, reusable_;
  std::optional<c10::Stream> user_;
};

/// Describes and wraps the values of `tensor` for sending: detached, contiguous, marked ready on the calling thread's
/// stream.
comm::Tensor wrap(const at::Tensor& tensor);

/// The received tensor, sharing the buffer's memory, for the calling thread's stream, which waits until it has arrived;
/// the buffer goes back to its pool when the tensor is freed.
/// A floating-point tensor whose sender tracks gradients becomes a leaf that requires them.
at::Tensor unwrap(const comm::Tensor& received);

}  // namespace fold3d::runtime
