#include "comm/ring/credits.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace fold3d::comm {
namespace {

constexpr std::size_t kFirstSliceBytes = 64u << 10;
constexpr std::size_t kLeastSliceBytes = 8u << 10, kMostSliceBytes = 4u << 20;
constexpr double kSliceSeconds = 1e-3;
constexpr std::size_t kLeastBufferBytes = 4u << 10;
constexpr double kBufferSeconds = 4e-4;
constexpr std::size_t kSliceAlignment = 64;  // no element is cut

constexpr double kWindowNs = 1e8;
constexpr double kEnoughNs = 5e6;     // less than this tells more about the clock than about the connection,
constexpr double kEnoughBytes = 1e6;  // unless so much went over

}  // namespace

std::size_t Credits::slice_bytes() const {
  const double speed = bandwidth();
  std::size_t bytes = fixed_;
  if (bytes == 0 && speed == 0.0) bytes = kFirstSliceBytes;
  if (bytes == 0) {
    bytes = std::clamp(static_cast<std::size_t>(speed * kSliceSeconds), kLeastSliceBytes, kMostSliceBytes);
  }
  return std::max(bytes / kSliceAlignment, std::size_t{1}) * kSliceAlignment;
}

std::size_t Credits::buffer_bytes(double round_trip_seconds) const {
  const double speed = bandwidth();
  if (speed == 0.0) return 0;
  // Two round trips: buffers that slow a long connection down would lower the speed that they follow.
  const double seconds = kBufferSeconds + 2.0 * round_trip_seconds;
  return std::max(static_cast<std::size_t>(speed * seconds), kLeastBufferBytes);
}

std::size_t Credits::pause_bytes(double bytes_per_second) {
  if (!std::isfinite(bytes_per_second) || bytes_per_second <= 0.0) {
    throw std::invalid_argument("a bandwidth must be positive and finite, not " + std::to_string(bytes_per_second));
  }
  Credits credits(0);
  credits.set_bandwidth(bytes_per_second);
  return credits.slice_bytes() + credits.buffer_bytes(0.0);
}

void BandwidthMeter::begins(std::int64_t now_ns, std::size_t unsent) {
  // What drained since the last slice counts only if the connection was never idle in between.
  if (unsent > 0 && unsent_ > 0) return;
  since_ns_ = now_ns;
  unsent_ = unsent;
}

void BandwidthMeter::ends(std::int64_t now_ns, std::size_t bytes, std::size_t unsent) {
  const auto left = static_cast<double>(unsent_) + static_cast<double>(bytes) - static_cast<double>(unsent);
  bytes_ += std::max(left, 0.0);
  time_ns_ += static_cast<double>(now_ns - since_ns_);
  since_ns_ = now_ns;
  unsent_ = unsent;
  if (time_ns_ > kWindowNs) {
    windows_[next_window_] = bytes_ / time_ns_ * 1e9;
    next_window_ = (next_window_ + 1) % windows_.size();
    bytes_ = time_ns_ = 0.0;
  }
}

double BandwidthMeter::bandwidth() const {
  const double best = *std::max_element(windows_.begin(), windows_.end());
  if (time_ns_ <= 0.0 || (time_ns_ < kEnoughNs && bytes_ < kEnoughBytes)) return best;
  return std::max(best, bytes_ / time_ns_ * 1e9);
}

}  // namespace fold3d::comm
