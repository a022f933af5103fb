// Sizes of results that may be symbols, as where a graph is traced.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fold3d::ops {

/// Bounds of a rank's part along a dimension.
struct Part {
  c10::SymInt first, length;
};

/// As part_length() has it.
Part part_of(const c10::SymInt& length, std::int64_t rank, std::int64_t size);
/// An empty tensor like `x` that has this length along `dim`.
at::Tensor empty_with(const at::Tensor& x, std::int64_t dim, const c10::SymInt& length);

}  // namespace fold3d::ops
