#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

namespace simdevice {

/// Work of a stream. What it holds is destroyed on the stream's thread, right after it has run.
class Task {
 public:
  virtual ~Task() = default;
  virtual void run() = 0;
};

/// A task of a callable, which may be one that cannot be copied.
template <class F>
std::unique_ptr<Task> make_task(F function) {
  class Holder final : public Task {
   public:
    explicit Holder(F&& function) : function_(std::move(function)) {}
    void run() override { function_(); }

   private:
    F function_;
  };
  return std::make_unique<Holder>(std::move(function));
}

/// A queue of tasks, and the thread that runs them in order, started with the first one. Thread-safe. Lives until the
/// process ends.
class Stream {
 public:
  /// number: among all streams. id: among those of its device; 0 is the default stream's.
  Stream(int number, int device, std::int64_t id, int priority)
      : number_(number), device_(device), id_(id), priority_(priority) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  int number() const { return number_; }
  int device() const { return device_; }
  std::int64_t id() const { return id_; }
  int priority() const { return priority_; }

  void push(std::unique_ptr<Task> task);

  /// Blocks until everything that was pushed before has run. False: not within `timeout`.
  bool wait_until_idle(std::chrono::milliseconds timeout = std::chrono::hours(24)) const;
  bool is_idle() const;

  /// The first error of a task since the last call; empty: none. Later tasks are run all the same.
  std::string take_error();

  /// For the task that is running: when the stream's work before it ended, if it was queued behind that, else now.
  std::chrono::steady_clock::time_point free_since() const;
  /// For the task that is running: takes up the stream until then. Many in a row, each from free_since() on, take their
  /// sum, however late the thread wakes up.
  void occupy_until(std::chrono::steady_clock::time_point end);

 private:
  void loop();

  const int number_;
  const int device_;
  const std::int64_t id_;
  const int priority_;
  mutable std::mutex mutex_;
  std::condition_variable pushed_;
  mutable std::condition_variable completed_;
  std::deque<std::unique_ptr<Task>> tasks_;
  std::uint64_t pushed_count_ = 0;
  std::uint64_t completed_count_ = 0;
  bool started_ = false;
  std::string error_;
  std::chrono::steady_clock::time_point busy_until_;  // of the thread alone
};

/// Up to so long does each task wait before it runs, at random; 0: not. For all streams.
void set_jitter(std::chrono::microseconds most);

}  // namespace simdevice
