#pragma once

#include <cstddef>
#include <vector>

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

}  // namespace fold3d::comm
