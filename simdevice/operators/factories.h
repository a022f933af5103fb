#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace simdevice {

at::Tensor empty_on_device(c10::IntArrayRef size, c10::IntArrayRef stride, c10::ScalarType dtype);

/// Changes the sizes; memory that is too small is replaced on the current stream, with what it holds.
const at::Tensor& resize_tensor(const at::Tensor& tensor, c10::IntArrayRef size,
                                std::optional<c10::MemoryFormat> format);

}  // namespace simdevice
