// TensorAllocator: torch's memory for what the torch-free communicator receives.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "comm/base/allocator.h"
#include "runtime/device/device.h"

namespace fold3d::runtime {

/// TensorBuffers on one device, of the dtypes that torch knows.
class TensorAllocator final : public comm::Allocator {
 public:
  explicit TensorAllocator(c10::Device device) : device_(device), compute_stream_(current_stream(device)) {}

  void begin() override { compute_stream_ = current_stream(device_); }
  void check(const comm::TensorDesc& desc) const override;
  std::shared_ptr<comm::Buffer> allocate(const comm::TensorDesc& desc) override;

 private:
  c10::Device device_;
  c10::Stream compute_stream_;  // of the thread that computes, in this step: where tensors are produced and used
};

}  // namespace fold3d::runtime
