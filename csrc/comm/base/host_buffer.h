#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "comm/base/allocator.h"
#include "comm/base/tensor.h"

namespace fold3d::comm {

/// Plain host memory, zero-initialised.
class HostBuffer final : public Buffer {
 public:
  explicit HostBuffer(std::size_t bytes) : data_(bytes) {}
  std::size_t bytes() const override { return data_.size(); }
  std::byte* host_data() override { return data_.data(); }

 private:
  std::vector<std::byte> data_;
};

/// Takes tensors of any dtype into plain host memory.
class HostAllocator final : public Allocator {
 public:
  std::shared_ptr<Buffer> allocate(const TensorDesc& desc) override {
    return std::make_shared<HostBuffer>(desc.bytes());
  }
};

}  // namespace fold3d::comm
