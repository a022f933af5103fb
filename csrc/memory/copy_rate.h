#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

namespace fold3d::memory {

/// Makes copies take as long as on a link of so many bytes per second that its users share, one copy after the other:
/// so a machine without an accelerator can play one. Thread-safe.
class CopyRate {
 public:
  /// `bytes_per_second`: 0 is no limit.
  explicit CopyRate(double bytes_per_second) : bytes_per_second_(bytes_per_second) {}

  /// When a copy of `bytes` is over that may begin at `now_ns`.
  std::int64_t take(std::int64_t now_ns, std::size_t bytes) {
    if (!(bytes_per_second_ > 0)) return now_ns;
    const std::lock_guard lock(mutex_);
    const std::int64_t begin = now_ns > free_ns_ ? now_ns : free_ns_;
    return free_ns_ = begin + static_cast<std::int64_t>(1e9 * static_cast<double>(bytes) / bytes_per_second_);
  }

 private:
  const double bytes_per_second_;
  std::mutex mutex_;
  std::int64_t free_ns_ = 0;
};

}  // namespace fold3d::memory
