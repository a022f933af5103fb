#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <mutex>

namespace fold3d::comm {

/// Measures the speed of a library's collectives by how long their slices took. A collective may have waited for a
/// replica that came late to it, or shared the link with another; so the fastest counts, of those of the last eight
/// windows of about a tenth of a second of sending. The streams of one rank share it. Thread-safe.
class SliceMeter {
 public:
  /// This rank sent so much in a collective whose slices together took so long; 0 seconds: nobody can say.
  void took(double bytes, double seconds) {
    if (!(bytes > 0) || !(seconds > 0)) return;
    const std::lock_guard lock(mutex_);
    best_ = std::max(best_, bytes / seconds);
    seconds_ += seconds;
    if (seconds_ < kWindow) return;
    windows_[next_window_] = best_;
    next_window_ = (next_window_ + 1) % windows_.size();
    best_ = seconds_ = 0;
  }

  /// Bytes per second; 0.0: nothing was measured.
  double bandwidth() const {
    const std::lock_guard lock(mutex_);
    return std::max(best_, *std::max_element(windows_.begin(), windows_.end()));
  }

 private:
  static constexpr double kWindow = 0.1;

  mutable std::mutex mutex_;
  double best_ = 0, seconds_ = 0;  // of the window under way
  std::array<double, 8> windows_{};
  std::size_t next_window_ = 0;
};

}  // namespace fold3d::comm
