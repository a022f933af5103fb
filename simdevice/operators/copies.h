#pragma once

#include <ATen/core/Tensor.h>

namespace simdevice {

/// Copies between and within devices, as CUDA orders them: within the device on its current stream; from one device to
/// another on the source's, both current streams waiting; from pageable memory what it holds at the call; to pageable
/// memory the host waits; with pinned memory and `non_blocking` the host waits for nothing.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking);
at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target);

/// A host operand of a kernel, with what it holds now.
at::Tensor snapshot(const at::Tensor& host);

}  // namespace simdevice
