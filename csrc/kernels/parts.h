// Copies of many pieces of memory in one launch: small tensors into one buffer, and out of it.
#pragma once

#include <cstddef>
#include <vector>

namespace fold3d::kernels {

struct Part {
  const void* from = nullptr;
  void* to = nullptr;
  std::size_t bytes = 0;
};

/// No part overlaps with where another goes.
namespace cpu {
void copy_parts(const std::vector<Part>& parts);
}

namespace cuda {
/// All memory is the device's, or host memory that it can read and write. Throws std::runtime_error when it cannot be
/// launched.
void copy_parts(const std::vector<Part>& parts, void* stream);
}  // namespace cuda

}  // namespace fold3d::kernels
