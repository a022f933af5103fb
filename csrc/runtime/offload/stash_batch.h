// StashBatch: the memory that one stash needs, collected in its forward, moved in one transfer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "memory/copy_lane.h"
#include "memory/host_pool.h"
#include "runtime/device/device.h"
#include "runtime/offload/saved_tensor.h"

namespace fold3d::runtime {

/// Storages that nobody moves: of parameters, of buffers, of the batch.
using Staying = std::unordered_set<const c10::StorageImpl*>;

/// One (chunk, micro-batch) from its forward to the end of its backward. save() is called in the forward; the rest by
/// the Offloader.
class StashBatch {
 public:
  static constexpr std::ptrdiff_t kLeastBytes = 1024;  ///< of a tensor; less is not worth a transfer

  explicit StashBatch(std::shared_ptr<const Staying> staying) : staying_(std::move(staying)) {}

  /// Keeps what is needed to read `tensor` in the backward. Tensors over the same storage share what moves. It stays
  /// where it is, if it is small, a leaf that requires a gradient, over a storage that stays, or not plain memory.
  SavedTensor save(const at::Tensor& tensor);

 private:
  friend class Offloader;

  /// Where a part lies in the slot.
  struct Place {
    std::weak_ptr<StashMemory> memory;  // gone when nobody will read it
    std::size_t offset = 0;
  };

  const std::shared_ptr<const Staying> staying_;
  std::unordered_map<const c10::StorageImpl*, std::weak_ptr<StashMemory>> by_storage_;  // until the forward is over
  std::vector<std::weak_ptr<StashMemory>> memories_;                                    // in the order of saving

  std::vector<Place> places_;  // of the large ones, then of the small ones
  std::size_t small_ = 0;      // of places_: those from here on share a piece of memory
  memory::Slot slot_;
  memory::CopyLane::Ticket left_ = 0, came_ = 0;
  std::shared_ptr<DeviceEvent> arrived_;
  std::shared_ptr<void> on_device_;  // its bytes in the arena's count
};

}  // namespace fold3d::runtime
