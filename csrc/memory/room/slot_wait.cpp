#include "memory/room/slot_wait.h"

namespace fold3d::memory {

Slot take_waiting(HostPool& pool, const CopyLane& in, std::size_t bytes, const std::string& user,
                  const std::function<void(CopyLane::Ticket)>& wait) {
  while (!pool.grows()) {
    if (Slot slot = pool.try_take(bytes)) return slot;
    const CopyLane::Ticket next = in.under_way();
    if (next == 0) break;
    wait(next);
  }
  return pool.take(bytes, user);
}

}  // namespace fold3d::memory
