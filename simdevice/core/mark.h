#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "simdevice/core/vector_clock.h"

namespace simdevice {

/// A point in a stream, made by recording an event there. Thread-safe.
class Mark {
 public:
  /// `seen`: what has happened when the stream is there.
  explicit Mark(VectorClock seen) : seen_(std::move(seen)) {}

  const VectorClock& seen() const { return seen_; }

  /// The stream has come here.
  void pass() {
    {
      const std::lock_guard lock(mutex_);
      passed_ = true;
      time_ = std::chrono::steady_clock::now();
    }
    changed_.notify_all();
  }

  bool is_passed() const {
    const std::lock_guard lock(mutex_);
    return passed_;
  }

  void wait() const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return passed_; });
  }

  /// When the stream came here; only of a mark that is passed.
  std::chrono::steady_clock::time_point time() const {
    const std::lock_guard lock(mutex_);
    return time_;
  }

 private:
  const VectorClock seen_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool passed_ = false;
  std::chrono::steady_clock::time_point time_;
};

}  // namespace simdevice
