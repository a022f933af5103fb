#pragma once

#include <ATen/ops/from_blob.h>

#include <cstddef>
#include <cstdint>

namespace fold3d::runtime {

/// Host memory as a tensor of bytes, which does not own it.
inline at::Tensor bytes_view(const std::byte* data, std::size_t size) {
  return at::from_blob(const_cast<std::byte*>(data), {static_cast<std::int64_t>(size)}, at::kByte);
}

}  // namespace fold3d::runtime
