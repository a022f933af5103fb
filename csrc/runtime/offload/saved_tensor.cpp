#include "runtime/offload/saved_tensor.h"

#include <ATen/TensorUtils.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <utility>

namespace fold3d::runtime {
namespace {

at::Tensor over(const c10::Storage& storage, at::TensorOptions options, std::int64_t offset, c10::IntArrayRef sizes,
                c10::IntArrayRef strides) {
  const c10::NoGradGuard no_grad;
  at::Tensor tensor = at::empty({0}, options.device(storage.device()));
  return tensor.set_(storage, offset, sizes, strides);
}

}  // namespace

at::Tensor StashMemory::view() const {
  return over(storage, at::kByte, begin - base, {static_cast<std::int64_t>(bytes())}, {1});
}

SavedTensor::SavedTensor(const at::Tensor& tensor) {
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  if (tensor.is_inference() || !counter.enabled()) return;
  version_ = counter;
  saved_version_ = counter.current_version();
}

SavedTensor SavedTensor::staying(const at::Tensor& tensor) {
  SavedTensor saved(tensor);
  saved.held_ = tensor.detach();  // the tensor itself may be what the node made: it would keep itself alive
  return saved;
}

SavedTensor::SavedTensor(const at::Tensor& tensor, std::shared_ptr<StashMemory> memory) : SavedTensor(tensor) {
  memory_ = std::move(memory);
  options_ = tensor.options();
  offset_ = tensor.storage_offset() * static_cast<std::ptrdiff_t>(tensor.element_size());
  sizes_ = tensor.sizes();
  strides_ = tensor.strides();
}

SavedTensor::SavedTensor(at::TensorOptions options, at::IntArrayRef sizes, std::shared_ptr<StashMemory> memory)
    : memory_(std::move(memory)), options_(options), sizes_(sizes), strides_(at::detail::defaultStrides(sizes)) {}

at::Tensor SavedTensor::tensor() const {
  TORCH_CHECK(!version_.enabled() || version_.current_version() == saved_version_,
              "one of the variables needed for gradient computation has been modified by an inplace operation: a saved "
              "tensor of shape ",
              memory_ ? c10::IntArrayRef(sizes_) : held_.sizes(), " is at version ", version_.current_version(),
              "; expected version ", saved_version_, " instead");
  if (!memory_) return held_;
  TORCH_CHECK(memory_->storage, "a saved tensor was read while its memory was offloaded: outside of its backward");
  const auto size = static_cast<std::ptrdiff_t>(options_.dtype().itemsize());
  return over(memory_->storage, options_, (offset_ - memory_->base) / size, sizes_, strides_);
}

}  // namespace fold3d::runtime
