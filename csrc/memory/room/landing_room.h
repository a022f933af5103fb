#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "core/ir/action.h"
#include "memory/copy_lane.h"
#include "memory/host_pool.h"

namespace fold3d::memory {

/// Slots for messages that land in the pool. Those that the program has come to are part of what it needs at that
/// moment; earlier ones may have only what it never needs, so that they take no room from others. Thread-safe.
class LandingRoom {
 public:
  static constexpr std::int64_t kAnyNumber = std::numeric_limits<std::int64_t>::max();

  /// `in`: the lane whose copies give slots back. Both outlive it. `timeout`: of a wait for one of them.
  LandingRoom(HostPool& pool, const CopyLane& in, std::chrono::milliseconds timeout);

  /// A run begins, while nobody takes. `spare`: bytes that early messages may have in all.
  void begin(std::int64_t spare);

  /// A slot of at least `bytes` for the message of `recv`. Blocks until it is due or may be early, and there is room.
  /// Throws PoolError when it is due and there is none, and AbortedError after abort().
  Slot take(const core::Action& recv, std::size_t bytes);

  /// The program has come to `recv`.
  void due(const core::Action& recv);

  /// Ends the waits, and those to come.
  void abort(const std::string& reason);

 private:
  bool may_land(const core::Action& recv, std::int64_t bytes);
  void wait_until_due(const core::Action& recv);
  void check_locked() const;

  HostPool& pool_;
  const CopyLane& in_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t spare_ = 0;
  std::set<core::Action> due_;
  std::map<core::Action, std::int64_t> early_;  // bytes
  std::string aborted_;
};

}  // namespace fold3d::memory
