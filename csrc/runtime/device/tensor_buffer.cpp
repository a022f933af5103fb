#include "runtime/device/tensor_buffer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

namespace fold3d::runtime {

comm::Tensor wrap(const at::Tensor& tensor) {
  // What travels is memory, in which a conjugate or negative view has other bits than its values.
  at::Tensor detached = tensor.detach().resolve_conj().resolve_neg().contiguous();
  comm::Tensor out;
  out.desc.dtype = static_cast<std::uint8_t>(detached.scalar_type());
  out.desc.element_bytes = static_cast<std::uint8_t>(detached.element_size());
  out.desc.requires_grad = tensor.requires_grad();
  out.desc.shape = detached.sizes().vec();
  auto buffer = std::make_shared<TensorBuffer>(std::move(detached));
  buffer->ready().record(current_stream(buffer->tensor().device()));
  out.buffer = std::move(buffer);
  return out;
}

at::Tensor unwrap(const comm::Tensor& received) {
  auto& buffer = static_cast<TensorBuffer&>(*received.buffer);
  const at::Tensor& memory = buffer.tensor();
  buffer.use_on(current_stream(memory.device()));
  const auto dtype = static_cast<at::ScalarType>(received.desc.dtype);
  const auto options = memory.options().dtype(dtype);
  at::Tensor tensor;
  if (memory.numel() == 0) {
    tensor = at::empty(received.desc.shape, options);
  } else {
    // The deleter holds the buffer: its memory is reused only after autograd has let go of the tensor.
    tensor = at::from_blob(
        memory.mutable_data_ptr(), received.desc.shape, [keep = received.buffer](void*) mutable { keep.reset(); },
        options);
  }
  if (received.desc.requires_grad) tensor.set_requires_grad(true);
  return tensor;
}

}  // namespace fold3d::runtime
