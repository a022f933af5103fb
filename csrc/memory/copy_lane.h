#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/base/moment.h"
#include "core/ir/action.h"
#include "memory/copy_rate.h"

namespace fold3d::memory {

/// When a device began what the lane has told it; set by the copy itself.
using DeviceStart = std::optional<comm::Moment>;

/// One copy as it happened; steady-clock nanoseconds.
struct CopyRecord {
  core::Action action;
  std::int64_t start_ns = 0, end_ns = 0;
  std::size_t bytes = 0;
  DeviceStart device_start = {};
};

/// A named thread that copies in one direction, in the order in which it was asked. Thread-safe.
class CopyLane {
 public:
  /// Number of a copy, from 1; 0: none.
  using Ticket = std::uint64_t;

  /// `name`: at most 15 characters. `rate`: shared by the lanes of a link.
  CopyLane(const std::string& name, std::shared_ptr<CopyRate> rate);
  /// Ends the copy under way, runs no other, joins.
  ~CopyLane();
  CopyLane(const CopyLane&) = delete;
  CopyLane& operator=(const CopyLane&) = delete;

  /// Queues a copy. `copy` runs on the lane's thread, and is destroyed there: what it holds on to may go with it. Once
  /// a copy has failed, none that comes later is run. Throws PoolError then. `device_start`: goes into the record.
  Ticket submit(const core::Action& action, std::size_t bytes, std::function<void()> copy,
                std::shared_ptr<const DeviceStart> device_start = nullptr);

  /// What limits it, for another lane of the same link.
  const std::shared_ptr<CopyRate>& rate() const { return rate_; }

  /// Whether the copy is done.
  bool is_done(Ticket ticket) const;

  /// The first copy that is not done; 0: all are.
  Ticket under_way() const;

  /// Blocks until the copy is done; `while_waiting` is called now and then, what it throws ends the wait. Throws
  /// PoolError when a copy failed, and after `timeout`.
  void wait(Ticket ticket, std::chrono::milliseconds timeout, const std::function<void()>& while_waiting = {}) const;

  /// As wait(), for all that were queued before.
  void wait_for_all(std::chrono::milliseconds timeout, const std::function<void()>& while_waiting = {}) const;

  /// The copies that were done since the last call.
  std::vector<CopyRecord> take_records();

 private:
  struct Job {
    core::Action action;
    std::size_t bytes = 0;
    std::function<void()> copy;
    std::shared_ptr<const DeviceStart> device_start;
  };

  void loop();
  void run(Job job);
  void check_locked() const;

  const std::string name_;
  const std::shared_ptr<CopyRate> rate_;
  mutable std::mutex mutex_;
  std::condition_variable work_;          // the lane waits: jobs_ or stopped_
  mutable std::condition_variable done_;  // somebody waits for done_count_
  std::deque<Job> jobs_;
  std::vector<CopyRecord> records_;
  Ticket submitted_ = 0;
  Ticket done_count_ = 0;
  std::string error_;
  bool stopped_ = false;
  std::thread thread_;  // last: starts when everything above exists
};

}  // namespace fold3d::memory
