#pragma once

#include <chrono>
#include <memory>

#include "core/ir/action.h"
#include "memory/copy_lane.h"
#include "memory/slot/slot.h"

namespace fold3d::memory {

/// Has `out` copy `pieces` into `slot`, and waits until that is done. The copy keeps `owner`, who has the memory that
/// it reads: a wait that ends before the copy has begun frees nothing. Throws what CopyLane::submit and wait throw.
void write_waiting(CopyLane& out, const core::Action& copy, const Slot& slot, const Pieces& pieces,
                   std::shared_ptr<const void> owner, std::chrono::milliseconds timeout);

}  // namespace fold3d::memory
