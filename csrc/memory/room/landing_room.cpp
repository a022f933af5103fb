#include "memory/room/landing_room.h"

#include "comm/base/errors.h"
#include "memory/room/slot_wait.h"
#include "memory/slot/tier.h"

namespace fold3d::memory {

LandingRoom::LandingRoom(HostPool& pool, const CopyLane& in, std::chrono::milliseconds timeout)
    : pool_(pool), in_(in), timeout_(timeout) {}

void LandingRoom::begin(std::int64_t spare) {
  const std::lock_guard lock(mutex_);
  spare_ = spare;
  due_.clear();
  early_.clear();
}

void LandingRoom::check_locked() const {
  if (!aborted_.empty()) throw comm::AbortedError(aborted_);
}

/// Waits for its turn; returns whether the message is early.
bool LandingRoom::may_land(const core::Action& recv, std::int64_t bytes) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !aborted_.empty() || due_.contains(recv) || bytes <= spare_; });
  check_locked();
  if (due_.contains(recv)) return false;
  early_[recv] = bytes;
  if (spare_ != kAnyNumber) spare_ -= bytes;
  return true;
}

void LandingRoom::wait_until_due(const core::Action& recv) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !aborted_.empty() || due_.contains(recv); });
  check_locked();
}

Slot LandingRoom::take(const core::Action& recv, std::size_t bytes) {
  const std::size_t page = Tier::kAlignment;
  const auto wait = [this](CopyLane::Ticket ticket) {
    in_.wait(ticket, timeout_);
    const std::lock_guard lock(mutex_);
    check_locked();
  };
  if (may_land(recv, static_cast<std::int64_t>((bytes + page - 1) / page * page))) {
    try {
      return take_waiting(pool_, in_, bytes, core::to_string(recv), wait);
    } catch (const PoolError&) {
      wait_until_due(recv);  // others were larger than before; until then they may come back
    }
  }
  return take_waiting(pool_, in_, bytes, core::to_string(recv), wait);
}

void LandingRoom::due(const core::Action& recv) {
  {
    const std::lock_guard lock(mutex_);
    due_.insert(recv);
    const auto early = early_.find(recv);
    if (early != early_.end()) {
      if (spare_ != kAnyNumber) spare_ += early->second;
      early_.erase(early);
    }
  }
  changed_.notify_all();
}

void LandingRoom::abort(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (aborted_.empty()) aborted_ = reason;
  }
  changed_.notify_all();
}

}  // namespace fold3d::memory
