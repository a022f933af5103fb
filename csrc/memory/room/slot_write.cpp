#include "memory/room/slot_write.h"

#include <cstddef>
#include <utility>

namespace fold3d::memory {

void write_waiting(CopyLane& out, const core::Action& copy, const Slot& slot, const Pieces& pieces,
                   std::shared_ptr<const void> owner, std::chrono::milliseconds timeout) {
  std::size_t total = 0;
  for (const Piece& piece : pieces) total += piece.bytes;
  auto job = [slot, pieces, owner = std::move(owner)] { slot.write(pieces); };
  out.wait(out.submit(copy, total, std::move(job)), timeout);
}

}  // namespace fold3d::memory
