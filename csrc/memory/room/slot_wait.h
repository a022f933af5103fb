#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "memory/copy_lane.h"
#include "memory/host_pool.h"

namespace fold3d::memory {

/// A slot of `bytes`. A slot goes back when the copy of what lay in it is done, however far the lane is behind what the
/// program says: where there is no room, it calls `wait` for one copy of `in` after the other, until there is room or
/// none is under way. A pool that grows does so instead. Throws PoolError, which names `user`, if there is no room, and
/// what `wait` throws.
Slot take_waiting(HostPool& pool, const CopyLane& in, std::size_t bytes, const std::string& user,
                  const std::function<void(CopyLane::Ticket)>& wait);

}  // namespace fold3d::memory
