#include "runtime/offload/message_landing.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "memory/room/slot_write.h"
#include "memory/slot/slot.h"

namespace fold3d::runtime {

MessageLanding::MessageLanding(memory::HostPool& pool, memory::CopyLane& out, const memory::CopyLane& in,
                               PoolPlan& plan, std::chrono::milliseconds timeout)
    : pool_(pool), out_(out), plan_(plan), timeout_(timeout), room_(pool, in, timeout) {}

comm::Tensors MessageLanding::take(const core::Action& recv, const std::vector<comm::TensorDesc>& descs) {
  std::size_t total = 0;
  for (const comm::TensorDesc& desc : descs) total = memory::slot_aligned(total) + desc.bytes();
  plan_.make_room(pool_, recv, total);
  const memory::Slot slot = room_.take(recv, total);
  comm::Tensors tensors;
  tensors.reserve(descs.size());
  std::size_t offset = 0;
  for (const comm::TensorDesc& desc : descs) {
    const auto bytes = static_cast<std::int64_t>(desc.bytes());
    at::Tensor memory = slot.data() == nullptr ? at::empty({bytes}, at::kByte)
                                               : at::from_blob(slot.data() + offset, {bytes}, at::kByte);
    tensors.push_back({desc, std::make_shared<SlotBuffer>(std::move(memory), slot, offset)});
    offset = memory::slot_aligned(offset + desc.bytes());
  }
  return tensors;
}

void MessageLanding::filled(const core::Action& recv, const comm::Tensors& tensors) {
  auto buffers = std::make_shared<std::vector<std::shared_ptr<SlotBuffer>>>();
  memory::Pieces pieces;
  for (const comm::Tensor& tensor : tensors) {
    auto buffer = std::static_pointer_cast<SlotBuffer>(tensor.buffer);
    if (buffer->slot().data() != nullptr || buffer->bytes() == 0) continue;
    pieces.push_back({buffer->host_data(), buffer->bytes(), buffer->offset()});
    buffers->push_back(std::move(buffer));
  }
  if (buffers->empty()) return;
  const bool forward = recv.kind == core::Kind::kRecvForward;
  const core::Action copy{recv.chunk, forward ? core::Kind::kOffloadForward : core::Kind::kOffloadBackward,
                          recv.micro_batch};
  memory::write_waiting(out_, copy, buffers->front()->slot(), pieces, buffers, timeout_);
  for (const auto& buffer : *buffers) buffer->moved();
}

void MessageLanding::abort(const std::string& reason) noexcept {
  try {
    room_.abort(reason);
  } catch (...) {
    // Out of memory for the text: the waits end when the program goes on, or with the process.
  }
}

}  // namespace fold3d::runtime
