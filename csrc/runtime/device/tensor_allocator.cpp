#include "runtime/device/tensor_allocator.h"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <string>

#include "comm/base/errors.h"
#include "runtime/device/tensor_buffer.h"

namespace fold3d::runtime {

namespace {

/// Whether elements of this dtype lie one after the other and say all about themselves.
bool is_dense(at::ScalarType dtype) { return dtype != at::ScalarType::Undefined && !c10::isQIntType(dtype); }

}  // namespace

void TensorAllocator::check(const comm::TensorDesc& desc) const {
  const auto dtype = static_cast<at::ScalarType>(desc.dtype);
  if (desc.dtype >= static_cast<std::uint8_t>(at::ScalarType::NumOptions) || !is_dense(dtype)) {
    throw comm::ProtocolError("the header of a message is damaged: it has a tensor of the unknown dtype " +
                              std::to_string(desc.dtype));
  }
  if (c10::elementSize(dtype) != desc.element_bytes) {
    throw comm::ProtocolError(std::string("the header of a message is damaged: an element of ") + c10::toString(dtype) +
                              " has " + std::to_string(c10::elementSize(dtype)) + " bytes, not " +
                              std::to_string(desc.element_bytes));
  }
}

std::shared_ptr<comm::Buffer> TensorAllocator::allocate(const comm::TensorDesc& desc) {
  // Freed memory is given to whoever allocates on the same stream next: to those that come after its last readers.
  const c10::StreamGuard guard(compute_stream_);
  const auto options = at::TensorOptions().device(device_).dtype(at::kByte);
  auto buffer = std::make_shared<TensorBuffer>(at::empty({static_cast<std::int64_t>(desc.bytes())}, options));
  buffer->reusable().record(compute_stream_);  // before that they may be reading
  return buffer;
}

}  // namespace fold3d::runtime
