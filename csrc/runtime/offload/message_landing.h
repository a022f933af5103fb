// MessageLanding: messages that land in the pool, not on the device (Fold3D V-C).
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/p2p/landing.h"
#include "memory/copy_lane.h"
#include "memory/host_pool.h"
#include "memory/room/landing_room.h"
#include "runtime/device/tensor_buffer.h"
#include "runtime/offload/parcel.h"
#include "runtime/offload/pool_plan.h"

namespace fold3d::runtime {

/// A received tensor in a slot of the pool, or in host memory on its way to one that cannot be addressed.
class SlotBuffer final : public TensorBuffer {
 public:
  SlotBuffer(at::Tensor bytes, memory::Slot slot, std::size_t offset)
      : TensorBuffer(std::move(bytes)), slot_(std::move(slot)), offset_(offset) {}

  const memory::Slot& slot() const { return slot_; }
  std::size_t offset() const { return offset_; }
  /// Its bytes are in the slot: what was on the way is let go.
  void moved() { let_go(); }

 private:
  const memory::Slot slot_;
  const std::size_t offset_;
};

class MessageLanding final : public comm::Landing {
 public:
  /// All of them outlive it.
  MessageLanding(memory::HostPool& pool, memory::CopyLane& out, const memory::CopyLane& in, PoolPlan& plan,
                 std::chrono::milliseconds timeout);

  /// A run begins; `spare`: as in memory::LandingRoom.
  void begin(std::int64_t spare) { room_.begin(spare); }

  comm::Tensors take(const core::Action& recv, const std::vector<comm::TensorDesc>& descs) override;
  void filled(const core::Action& recv, const comm::Tensors& tensors) override;
  void due(const core::Action& recv) override { room_.due(recv); }
  void abort(const std::string& reason) noexcept override;

 private:
  memory::HostPool& pool_;
  memory::CopyLane& out_;
  PoolPlan& plan_;
  const std::chrono::milliseconds timeout_;
  memory::LandingRoom room_;
};

}  // namespace fold3d::runtime
