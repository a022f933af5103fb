#include "comm/ring/credits.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "comm/base/clock.h"
#include "comm/ring/ring_connection.h"

namespace fold3d::comm {
namespace {

constexpr std::size_t kFirstSliceBytes = 64u << 10;
constexpr std::size_t kLeastSliceBytes = 8u << 10, kMostSliceBytes = 4u << 20;
constexpr double kSliceSeconds = 1e-3;
constexpr std::size_t kLeastBufferBytes = 4u << 10;
constexpr double kBufferSeconds = 4e-4;
constexpr double kMostFlightSeconds = 0.1;
constexpr double kLostSpeed = 0.93, kWeight = 0.3;
constexpr int kLearning = 2, kMemory = 20;   // windows of the meter
constexpr std::size_t kSliceAlignment = 64;  // no element is cut

constexpr double kWindowNs = 1e8;
constexpr double kNewest = 0.05;      // least weight of the last window in the mean
constexpr double kEnoughNs = 5e6;     // less than this tells more about the clock than about the connection,
constexpr double kEnoughBytes = 1e6;  // unless so much went over

}  // namespace

void Credits::begins() {
  const std::lock_guard lock(mutex_);
  meter_.begins(now_ns(), queue());
}

void Credits::ends(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  meter_.ends(now_ns(), bytes, queue());
  if (const double bandwidth = meter_.bandwidth(); bandwidth > 0.0) set_bandwidth(bandwidth);
}

double Credits::sustained() const {
  const std::lock_guard lock(mutex_);
  return meter_.sustained();
}

/// Of all lines together.
SendQueue Credits::queue() const {
  SendQueue all;
  for (const auto& line : measured_) {
    const SendQueue one = line->queue();
    all.arrived += one.arrived;
    all.waiting += one.waiting;
    all.is_empty = all.is_empty && one.is_empty;
    all.is_known = all.is_known && one.is_known;
  }
  return all;
}

std::size_t Credits::slice_bytes() const {
  const double speed = bandwidth() / lines_;
  std::size_t bytes = fixed_;
  if (bytes == 0 && speed == 0.0) bytes = kFirstSliceBytes;
  if (bytes == 0) {
    bytes = std::clamp(static_cast<std::size_t>(speed * kSliceSeconds), kLeastSliceBytes, kMostSliceBytes);
  }
  return std::max(bytes / kSliceAlignment, std::size_t{1}) * kSliceAlignment;
}

std::size_t Credits::waiting_bytes() const {
  const double speed = bandwidth() / lines_;
  if (speed == 0.0) return 0;
  return std::max(static_cast<std::size_t>(speed * kBufferSeconds), kLeastBufferBytes);
}

std::size_t Credits::pause_bytes(double bytes_per_second) {
  if (!std::isfinite(bytes_per_second) || bytes_per_second <= 0.0) {
    throw std::invalid_argument("a bandwidth must be positive and finite, not " + std::to_string(bytes_per_second));
  }
  Credits credits(0);
  credits.set_bandwidth(bytes_per_second);
  return credits.slice_bytes() + credits.waiting_bytes();
}

void FlightLimit::measured(double speed, bool alone) {
  ++windows_;
  average_ = average_ == 0.0 ? speed : (1.0 - kWeight) * average_ + kWeight * speed;
  if (free_ == 0.0) {
    if (windows_ < kLearning) return;
    free_ = average_;
    windows_ = 0;
  } else if (!alone) {
    average_ = std::max(average_, free_);  // what else wants the card slows it down, too
  } else if (average_ < kLostSpeed * free_) {
    seconds_ = std::min(2.0 * seconds_, kMostFlightSeconds);
    if (seconds_ == kMostFlightSeconds) free_ = 0.0;  // it is not the limit: learn anew
    average_ = free_;
    windows_ = 0;
  } else {
    free_ = std::max(free_, average_);
    if (windows_ % kMemory == 0) seconds_ = std::max(seconds_ / 2.0, kLeastSeconds);
  }
}

std::size_t FlightLimit::bytes(double speed, double round_trip_seconds) const {
  if (speed == 0.0 || free_ == 0.0) return 0;
  return static_cast<std::size_t>(speed * (2.0 * round_trip_seconds + seconds_));
}

void BandwidthMeter::begins(std::int64_t now_ns, const SendQueue& queue) {
  if (queue.is_empty && queue.is_known && sending_ == 0) answered_ = false;
  // What arrived since the last slice counts only if there was something to send all along.
  if (sending_++ == 0 && queue.waiting == 0) restart(now_ns, queue);
}

bool BandwidthMeter::ends(std::int64_t now_ns, std::size_t bytes, const SendQueue& queue) {
  --sending_;
  sent_ += bytes;
  if (!answered_) {  // the first bytes are still on their way: from when these arrive on the line is full
    answered_ = !queue.is_known || arrived(queue) > arrived_;
    if (!answered_) {
      restart(now_ns, queue);
      return false;
    }
  }
  bytes_ += static_cast<double>(arrived(queue) - arrived_);
  time_ns_ += static_cast<double>(now_ns - since_ns_);
  restart(now_ns, queue);
  if (time_ns_ <= kWindowNs) return false;
  const double speed = windows_[next_window_] = bytes_ / time_ns_ * 1e9;
  sustained_ += std::max(kNewest, 1.0 / ++measured_) * (speed - sustained_);
  next_window_ = (next_window_ + 1) % windows_.size();
  bytes_ = time_ns_ = 0.0;
  return true;
}

void BandwidthMeter::restart(std::int64_t now_ns, const SendQueue& queue) {
  since_ns_ = now_ns;
  arrived_ = arrived(queue);
}

double BandwidthMeter::bandwidth() const {
  const double best = *std::max_element(windows_.begin(), windows_.end());
  if (time_ns_ <= 0.0 || (time_ns_ < kEnoughNs && bytes_ < kEnoughBytes)) return best;
  return std::max(best, bytes_ / time_ns_ * 1e9);
}

}  // namespace fold3d::comm
