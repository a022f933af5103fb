#include "simdevice/operators/copies.h"

#include <ATen/ops/clone.h>
#include <torch/library.h>

#include <memory>
#include <vector>

#include "simdevice/device/current.h"
#include "simdevice/device/tensors.h"

namespace simdevice {

namespace {

void queue_copy(Stream* stream, const char* name, const at::Tensor& source, const at::Tensor& target) {
  std::vector<Access> accesses;
  add_access(accesses, source, false);
  add_access(accesses, target, true);
  at::Tensor from = source.is_privateuseone() || block_of(source) != nullptr ? host_alias(source) : source;
  launch_kernel(stream, name, accesses, [from, to = host_alias(target)] { to.copy_(from); });
}

void copy_within(const at::Tensor& source, const at::Tensor& target) {
  Stream* const from = current_stream(source.device().index());
  Stream* const to = current_stream(target.device().index());
  if (from->device() == to->device()) return queue_copy(from, "copy on the device", source, target);
  runtime().wait(from, runtime().record(to));
  queue_copy(from, "copy to another device", source, target);
  runtime().wait(to, runtime().record(from));
}

void copy_in(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  Stream* const stream = current_stream(target.device().index());
  Block* const pinned = block_of(source);
  if (pinned != nullptr) runtime().record_use(pinned, stream);
  queue_copy(stream, "copy to the device", pinned != nullptr ? source : snapshot(source), target);
  if (!non_blocking) runtime().synchronize(stream);
}

void copy_out(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  Stream* const stream = current_stream(source.device().index());
  queue_copy(stream, "copy to the host", source, target);
  Block* const pinned = block_of(target);
  if (pinned != nullptr && non_blocking) {
    runtime().record_use(pinned, stream);
  } else {
    runtime().synchronize(stream);
  }
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  Stream* const stream = current_stream(tensor.device().index());
  std::vector<Access> accesses;
  add_access(accesses, tensor, false);
  auto value = std::make_shared<at::Scalar>();
  launch_kernel(stream, "item", accesses, [alias = host_alias(tensor), value] { *value = alias.item(); });
  runtime().synchronize(stream);
  return *value;
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  if (Block* const block = block_of(tensor)) runtime().record_use(block, stream_of(stream));
}

}  // namespace

at::Tensor snapshot(const at::Tensor& host) {
  return host.unsafeGetTensorImpl()->is_wrapped_number() ? host : host.detach().clone();
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  if (source.is_privateuseone() && target.is_privateuseone()) {
    copy_within(source, target);
  } else if (target.is_privateuseone()) {
    copy_in(source, target, non_blocking);
  } else {
    copy_out(source, target, non_blocking);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (source.sizes() != target.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("record_stream", record_stream);
}

// Aliases carry the bits; torch's own fallback would clone, which copies, which clones.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace simdevice
