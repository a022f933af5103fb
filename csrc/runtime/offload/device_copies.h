// DeviceCopies: copies between a device's memory and a slot of the pool. On CUDA on a stream of its own in each
// direction.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "memory/copy_lane.h"
#include "memory/host_pool.h"
#include "memory/host_tier.h"
#include "runtime/device/device.h"
#include "runtime/device/stream_clock.h"

namespace fold3d::runtime {

/// Bytes on the device, uint8 [n], and where they go in a slot.
struct DevicePiece {
  at::Tensor memory;
  std::size_t offset = 0;
};

/// Called by the two lanes, each in its direction only.
class DeviceCopies {
 public:
  /// `packs`: small pieces are put together by csrc/kernels. `clock`: of the device.
  DeviceCopies(c10::Device device, bool packs, std::shared_ptr<StreamClock> clock);

  /// How the pool's memory is reserved: pinned where the device asks for that.
  memory::ReserveHost reserve() const;

  /// Copies `pieces` to the slot; they are read when the device has passed `ready`. Returns when they may be reused.
  /// From `small` on, pieces go in one transfer. `start`: gets when the device begins.
  void out(const memory::Slot& slot, const std::vector<DevicePiece>& pieces, std::size_t small,
           const DeviceEvent& ready, memory::DeviceStart& start);

  /// Fills `pieces` from the slot, once the device has passed `ready`, and records `arrived`: when the device has
  /// passed that, they are filled. Returns before that where the device works by itself. `start`: as above.
  void in(const memory::Slot& slot, const std::vector<DevicePiece>& pieces, const DeviceEvent& ready,
          DeviceEvent& arrived, memory::DeviceStart& start);

 private:
  c10::Device device_;
  bool packs_;
  std::shared_ptr<StreamClock> clock_;
  c10::Stream out_, in_;
};

}  // namespace fold3d::runtime
