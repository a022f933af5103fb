#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace simdevice {

/// Runs any operator by its CPU kernel, on the current stream's thread, over the device's memory. The host goes on at
/// once where the results' sizes are known before, else it waits, as CUDA's kernels make it wait for nonzero().
void run_on_stream(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// How many operators made the host wait because their results' sizes could not be known.
std::uint64_t blocking_operators();

}  // namespace simdevice
