// A tensor that stands for an exchange under way.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "ops/tensor_group.h"

namespace fold3d::ops {

/// Returns a tensor, int64 [1] in host memory, that owns the exchange: so graphs of torch's can pass it on.
at::Tensor handle_of(std::shared_ptr<Started> started);
/// The exchange of a tensor that handle_of() returned, or of a copy of one that still exists. Throws
/// std::invalid_argument for another one.
std::shared_ptr<Started> started_of(const at::Tensor& handle);

}  // namespace fold3d::ops
