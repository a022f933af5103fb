// Kernels of csrc/kernels for who has tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <vector>

namespace fold3d::runtime {

/// Whether torch.ops.fold3d.squares, adamw_, pack and unpack run on tensors of this device.
bool has_kernels(c10::Device device);

/// Copies the bytes of `parts`, each contiguous, to `buffer`, uint8 [n], where `offsets` say. One launch on the current
/// stream. Throws c10::Error when a part does not fit, or has_kernels() is false.
void pack(const std::vector<at::Tensor>& parts, const std::vector<std::int64_t>& offsets, const at::Tensor& buffer);

}  // namespace fold3d::runtime
