#include "simdevice/operators/factories.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <tuple>

#include "simdevice/device/allocators.h"
#include "simdevice/device/current.h"
#include "simdevice/device/tensors.h"

namespace simdevice {

namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Device chosen(const std::optional<c10::Device>& device) {
  return device_at(device.has_value() ? index_of(*device) : current_device());
}

at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                               std::optional<c10::Device> device, std::optional<bool>,
                               std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_generic(size, c10::GetAllocator(c10::kPrivateUse1), kKeys, c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(chosen(device));
  return empty_on_device(size, stride, c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<std::int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

/// Replaces the storage's memory by more of it.
void grow(const at::Tensor& tensor, std::size_t bytes) {
  auto* const storage = tensor.storage().unsafeGetStorageImpl();
  if (storage->nbytes() >= bytes) return;
  const c10::DeviceGuard guard(tensor.device());
  c10::DataPtr grown = allocate_on_device(bytes);
  if (const std::size_t kept = storage->nbytes()) {
    const void* const from = storage->data();
    void* const to = grown.get();
    const auto range = [&](const void* at) { return dense(reinterpret_cast<std::uintptr_t>(at), kept); };
    launch_kernel(current_stream(tensor.device().index()), "aten::resize_",
                  {{block_of(storage->data_ptr()), range(from), false}, {block_of(grown), range(to), true}},
                  [from, to, kept] { std::memcpy(to, from, kept); });
  }
  storage->set_data_ptr_noswap(std::move(grown));
  storage->set_nbytes(bytes);
}

/// With a mask from the launch's generator; torch's own composite would draw it in another way for every dtype.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true) || p == 0) return {input.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

}  // namespace

at::Tensor empty_on_device(c10::IntArrayRef size, c10::IntArrayRef stride, c10::ScalarType dtype) {
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(c10::kPrivateUse1), kKeys, dtype);
}

const at::Tensor& resize_tensor(const at::Tensor& tensor, c10::IntArrayRef size,
                                std::optional<c10::MemoryFormat> format) {
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format.has_value() && *format != c10::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  grow(tensor, at::detail::computeStorageNbytesContiguous(size, tensor.itemsize(),
                                                          static_cast<std::size_t>(tensor.storage_offset())));
  return tensor;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  library.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  library.impl("resize_", resize_tensor);
  library.impl("native_dropout", native_dropout);
  // Else Module.to() makes new Parameters, and tied weights are tied no more.
  library.impl("_has_compatible_shallow_copy_type", [](const at::Tensor&, const at::Tensor&) { return true; });
  using SetTensor = at::Tensor& (*)(at::Tensor&, const at::Tensor&);
  using SetStorage = at::Tensor& (*)(at::Tensor&, at::Storage);
  using SetPart = at::Tensor& (*)(at::Tensor&, at::Storage, std::int64_t, c10::IntArrayRef, c10::IntArrayRef);
  library.impl("set_.source_Tensor", static_cast<SetTensor>(at::native::set_tensor_));
  library.impl("set_.source_Storage", static_cast<SetStorage>(at::native::set_));
  library.impl("set_.source_Storage_storage_offset", static_cast<SetPart>(at::cpu::set_));
}

}  // namespace simdevice
