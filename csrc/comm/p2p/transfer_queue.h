#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <limits>
#include <mutex>
#include <string>
#include <thread>

namespace fold3d::comm {

/// One named thread that runs numbered tasks 0, 1, 2, ... in order. Because the order is fixed, "which tasks
/// may run" and "which tasks are done" are two counters: handing over and waiting allocate nothing.
///
/// A step is start(total), then raise(limit) as tasks become allowed, and wait(count). Those come from one
/// thread at a time; stop() comes from any.
class TransferQueue {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Outcome { kDone, kStopped, kTimeout };

  /// `run(k)` is called on the queue's thread without any lock held and must not throw. `name`: at most 15
  /// characters.
  TransferQueue(const std::string& name, std::function<void(std::size_t)> run);
  /// Stops and joins; returns once the task under way has returned.
  ~TransferQueue();
  TransferQueue(const TransferQueue&) = delete;
  TransferQueue& operator=(const TransferQueue&) = delete;

  /// Begins a step of `total` tasks, none of which may run yet. The step before must be complete (see
  /// idle()).
  void start(std::size_t total);
  /// Tasks [0, min(limit, total)) may run from now on. Never lowers the limit.
  void raise(std::size_t limit);
  /// Runs task `index` on the calling thread instead, if every task before it is done: saves waking the queue.
  /// Returns false, having done nothing, if the queue is not there yet or was stopped.
  bool run_here(std::size_t index);
  /// Blocks until tasks [0, count) are done, the queue was stopped or the deadline has passed; done wins over
  /// the others.
  Outcome wait(std::size_t count, Clock::time_point deadline);
  /// Whether tasks [0, count) are done.
  bool is_done(std::size_t count);
  /// Whether every task of the step is done.
  bool idle();
  /// Ends every wait and runs no further task. Does not interrupt the task under way. Idempotent.
  void stop();

 private:
  void loop();

  static constexpr std::size_t kNobodyWaits = std::numeric_limits<std::size_t>::max();

  const std::function<void(std::size_t)> run_;
  std::mutex mutex_;
  std::condition_variable work_;  // the queue waits: next_ < limit_ or stopped_
  std::condition_variable done_;  // the executor waits: done_count_ >= wanted_ or stopped_
  std::size_t total_ = 0;
  std::size_t limit_ = 0;
  std::size_t next_ = 0;
  std::size_t done_count_ = 0;
  std::size_t wanted_ = kNobodyWaits;
  bool stopped_ = false;
  std::thread thread_;  // last: starts when everything above exists
};

}  // namespace fold3d::comm
