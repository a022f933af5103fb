#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "simdevice/core/runtime.h"

namespace simdevice {

/// A CPU tensor over the same memory, for kernels to work on. It keeps nothing alive: a queued kernel holds on to
/// memory no more than a GPU's does, so that what is freed too early shows.
at::Tensor host_alias(const at::Tensor& tensor);

Block* block_of(const at::Tensor& tensor);

/// Adds what a kernel touches of `tensor`, if that is memory of ours.
void add_access(std::vector<Access>& accesses, const at::Tensor& tensor, bool writes);

/// Where in the program the calling thread is, for reports; set by the bindings.
using Locator = std::string (*)();
void set_locator(Locator locator);

/// A kernel on the stream, without autograd; the name gets the line of the program that launched it.
void launch_task(Stream* stream, const std::string& name, const std::vector<Access>& accesses,
                 std::unique_ptr<Task> task);

/// As launch_task(), of a callable.
template <class F>
void launch_kernel(Stream* stream, const std::string& name, const std::vector<Access>& accesses, F kernel) {
  launch_task(stream, name, accesses, make_task(std::move(kernel)));
}

}  // namespace simdevice
