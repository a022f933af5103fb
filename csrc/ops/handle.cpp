#include "ops/handle.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>

#include <stdexcept>
#include <utility>

namespace fold3d::ops {
namespace {

struct Handle {
  std::int64_t number = 0;  // what the tensor shows
  std::shared_ptr<Started> started;
};

void release(void* context) { delete static_cast<Handle*>(context); }

}  // namespace

at::Tensor handle_of(std::shared_ptr<Started> started) {
  auto* const handle = new Handle{.number = 0, .started = std::move(started)};
  c10::DataPtr data(&handle->number, handle, &release, c10::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t{}, sizeof(std::int64_t), std::move(data), /*allocator=*/nullptr,
                       /*resizable=*/false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), caffe2::TypeMeta::Make<std::int64_t>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({1});
  return tensor;
}

std::shared_ptr<Started> started_of(const at::Tensor& handle) {
  if (handle.defined() && handle.is_cpu() && handle.has_storage()) {
    const c10::DataPtr& data = handle.storage().data_ptr();
    if (data.get_deleter() == &release) return static_cast<Handle*>(data.get_context())->started;
  }
  throw std::invalid_argument(
      "this tensor is no handle of an exchange: pass on what tp_..._start returned, not a copy");
}

}  // namespace fold3d::ops
