// How many bytes CPU tensors hold: torch keeps such books for GPUs only.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fold3d::runtime {

/// Begins or stops to count what torch's CPU allocator gives out; returns whether that is being done now. What was
/// given out while nobody counted is in no figure, nor is when it is freed. Costs nothing while it is off, and two
/// atomic additions per tensor while it is on.
///
/// Puts an allocator around torch's own (the memory is the same); where somebody has set another one, that stays and
/// nothing is counted. One thread at a time.
bool count_cpu_bytes(bool on);

/// Bytes of the tensors that were allocated while counting and are alive, as malloc rounds them. Any thread.
std::int64_t live_cpu_bytes();

/// The most there were since `reset_peak_cpu_bytes`. Any thread.
std::int64_t peak_cpu_bytes();

/// Begins the search for the most with what there is now. Any thread.
void reset_peak_cpu_bytes();

/// Whether what this thread allocates from now on stands for the host's memory beside a device: it is in no figure but
/// `host_cpu_bytes`. Returns whether it did before.
bool allocate_as_host(bool on);

/// Bytes of the living tensors that stand for the host's memory, and were allocated while counting. Any thread.
std::int64_t host_cpu_bytes();

/// Whether the memory of `tensor` is in the figures.
bool is_counted(const at::Tensor& tensor);

}  // namespace fold3d::runtime
