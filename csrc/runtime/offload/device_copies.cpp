#include "runtime/offload/device_copies.h"

#include <ATen/Context.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <utility>

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

/// `count` bytes of the slot as the device's copies see them.
at::Tensor host_view(std::byte* data, std::size_t count) {
  return at::from_blob(data, {static_cast<std::int64_t>(count)}, at::kByte);
}

/// The pieces from `small` on as one, the gaps between them filled.
std::vector<DevicePiece> gathered(std::vector<DevicePiece> pieces, std::size_t small) {
  if (pieces.size() < small + 2) return pieces;
  const std::size_t begin = pieces[small].offset;
  std::vector<at::Tensor> parts;
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

}  // namespace

DeviceCopies::DeviceCopies(c10::Device device)
    : device_(device),
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
                       const DeviceEvent& ready) {
  const c10::NoGradGuard no_grad;
  if (device_.is_cpu()) return slot.tier().write(slot.begin(), addresses_of(pieces));
  const c10::StreamGuard guard(out_);
  ready.block(out_);
  // Pieces of memory that is not the pool's, for a tier that cannot be addressed.
  at::Tensor bounce;
  std::byte* target = slot.data();
  if (target == nullptr) {
    bounce = at::empty({static_cast<std::int64_t>(end_of(pieces))}, at::TensorOptions(at::kByte).pinned_memory(true));
    target = static_cast<std::byte*>(bounce.mutable_data_ptr());
  }
  const std::vector<DevicePiece> few = gathered(pieces, small);
  for (const DevicePiece& piece : few) {
    host_view(target + piece.offset, piece.memory.nbytes()).copy_(piece.memory, /*non_blocking=*/true);
  }
  DeviceEvent done;
  done.record(out_);
  done.synchronize();
  if (bounce.defined()) slot.tier().write(slot.begin(), {{target, bounce.nbytes(), 0}});
}

void DeviceCopies::in(const memory::Slot& slot, const std::vector<DevicePiece>& pieces, const DeviceEvent& ready,
                      DeviceEvent& arrived) {
  const c10::NoGradGuard no_grad;
  if (device_.is_cpu()) return slot.tier().read(slot.begin(), addresses_of(pieces));
  const c10::StreamGuard guard(in_);
  at::Tensor bounce;
  std::byte* source = slot.data();
  if (source == nullptr) {
    bounce = at::empty({static_cast<std::int64_t>(end_of(pieces))}, at::TensorOptions(at::kByte).pinned_memory(true));
    source = static_cast<std::byte*>(bounce.mutable_data_ptr());
    slot.tier().read(slot.begin(), {{source, bounce.nbytes(), 0}});
  }
  ready.block(in_);
  for (const DevicePiece& piece : pieces) {
    piece.memory.copy_(host_view(source + piece.offset, piece.memory.nbytes()), /*non_blocking=*/true);
  }
  arrived.record(in_);
  if (bounce.defined()) arrived.synchronize();
}

}  // namespace fold3d::runtime
