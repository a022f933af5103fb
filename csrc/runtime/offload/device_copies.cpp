#include "runtime/offload/device_copies.h"

#include <ATen/Context.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <functional>
#include <utility>

#include "runtime/kernels/kernel_ops.h"

namespace fold3d::runtime {
namespace {

memory::Pieces addresses_of(const std::vector<DevicePiece>& pieces) {
  memory::Pieces plain;
  plain.reserve(pieces.size());
  for (const DevicePiece& piece : pieces) {
    plain.push_back({static_cast<std::byte*>(piece.memory.mutable_data_ptr()), piece.memory.nbytes(), piece.offset});
  }
  return plain;
}

/// The pieces from `small` on as one, with anything in the gaps between them.
std::vector<DevicePiece> gathered(std::vector<DevicePiece> pieces, std::size_t small, bool packs) {
  if (pieces.size() < small + 2) return pieces;
  const std::size_t begin = pieces[small].offset;
  std::vector<at::Tensor> parts;
  if (packs) {
    std::vector<std::int64_t> offsets;
    for (std::size_t k = small; k < pieces.size(); ++k) {
      offsets.push_back(static_cast<std::int64_t>(pieces[k].offset - begin));
      parts.push_back(std::move(pieces[k].memory));
    }
    const auto bytes = offsets.back() + static_cast<std::int64_t>(parts.back().nbytes());
    const at::Tensor together = at::empty({bytes}, parts.front().options());
    pack(parts, offsets, together);
    pieces.resize(small);
    pieces.push_back({together, begin});
    return pieces;
  }
  std::size_t at = begin;
  for (std::size_t k = small; k < pieces.size(); ++k) {
    if (pieces[k].offset > at) {
      parts.push_back(at::zeros({static_cast<std::int64_t>(pieces[k].offset - at)}, pieces[k].memory.options()));
    }
    at = pieces[k].offset + pieces[k].memory.nbytes();
    parts.push_back(std::move(pieces[k].memory));
  }
  pieces.resize(small);
  pieces.push_back({at::cat(parts), begin});
  return pieces;
}

std::size_t end_of(const std::vector<DevicePiece>& pieces) {
  return pieces.empty() ? 0 : pieces.back().offset + pieces.back().memory.nbytes();
}

/// Pinned memory as large as the pieces reach, for a slot that cannot be addressed.
at::Tensor bounce_of(const std::vector<DevicePiece>& pieces) {
  return at::empty({static_cast<std::int64_t>(end_of(pieces))}, at::TensorOptions(at::kByte).pinned_memory(true));
}

memory::Pieces whole(const at::Tensor& bounce) {
  return {{static_cast<std::byte*>(bounce.mutable_data_ptr()), bounce.nbytes(), 0}};
}

/// Calls `copy` with each part of `piece` that lies together in the slot, there and on the device; with `bounce`,
/// there.
void for_each_part(const memory::Slot& slot, const at::Tensor& bounce, const DevicePiece& piece,
                   const std::function<void(const at::Tensor& host, const at::Tensor& device)>& copy) {
  const auto bytes = static_cast<std::int64_t>(piece.memory.nbytes());
  if (bounce.defined()) {
    return copy(bounce.narrow(0, static_cast<std::int64_t>(piece.offset), bytes), piece.memory);
  }
  std::int64_t at = 0;
  for (const memory::Slot::Span& span : slot.spans(piece.offset, piece.memory.nbytes())) {
    const auto count = static_cast<std::int64_t>(span.bytes);
    copy(at::from_blob(span.data(), {count}, at::kByte), piece.memory.narrow(0, at, count));
    at += count;
  }
}

}  // namespace

DeviceCopies::DeviceCopies(c10::Device device, bool packs, std::shared_ptr<StreamClock> clock)
    : device_(device),
      packs_(packs),
      clock_(std::move(clock)),
      out_(side_stream(device, /*high_priority=*/false)),
      in_(side_stream(device, /*high_priority=*/false)) {}

memory::ReserveHost DeviceCopies::reserve() const {
  if (device_.is_cpu()) return memory::reserve_pages;
  return [device = device_](std::size_t bytes) {
    const auto memory =
        std::make_shared<c10::DataPtr>(at::globalContext().getPinnedMemoryAllocator(device.type())->allocate(bytes));
    return std::shared_ptr<std::byte>(memory, static_cast<std::byte*>(memory->get()));
  };
}

void DeviceCopies::out(const memory::Slot& slot, const std::vector<DevicePiece>& pieces, std::size_t small,
                       const DeviceEvent& ready, memory::DeviceStart& start) {
  const c10::NoGradGuard no_grad;
  if (device_.is_cpu()) return slot.write(addresses_of(pieces));
  const c10::StreamGuard guard(out_);
  ready.block(out_);
  start = clock_->now(out_);
  // Pieces of memory that is not the pool's, for a tier that cannot be addressed.
  at::Tensor bounce;
  if (!slot.is_addressable()) bounce = bounce_of(pieces);
  const std::vector<DevicePiece> few = gathered(pieces, small, packs_);
  for (const DevicePiece& piece : few) {
    for_each_part(slot, bounce, piece,
                  [](const at::Tensor& host, const at::Tensor& device) { host.copy_(device, /*non_blocking=*/true); });
  }
  DeviceEvent done;
  done.record(out_);
  done.synchronize();
  if (bounce.defined()) slot.write(whole(bounce));
}

void DeviceCopies::in(const memory::Slot& slot, const std::vector<DevicePiece>& pieces, const DeviceEvent& ready,
                      DeviceEvent& arrived, memory::DeviceStart& start) {
  const c10::NoGradGuard no_grad;
  if (device_.is_cpu()) return slot.read(addresses_of(pieces));
  const c10::StreamGuard guard(in_);
  at::Tensor bounce;
  if (!slot.is_addressable()) {
    bounce = bounce_of(pieces);
    slot.read(whole(bounce));
  }
  ready.block(in_);
  start = clock_->now(in_);
  for (const DevicePiece& piece : pieces) {
    for_each_part(slot, bounce, piece,
                  [](const at::Tensor& host, const at::Tensor& device) { device.copy_(host, /*non_blocking=*/true); });
  }
  arrived.record(in_);
  if (bounce.defined()) arrived.synchronize();
}

}  // namespace fold3d::runtime
