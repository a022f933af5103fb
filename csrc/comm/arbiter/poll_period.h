#pragma once

#include <algorithm>
#include <chrono>

namespace fold3d::comm {

/// How long to wait between two looks at what wakes nobody, such as a mark in a device's stream: the wait that a device
/// has for one knows no time limit, ends for no failure of another rank, and may keep a core busy. A look comes late by
/// an eighth of the time waited so far at most, or of how long such a wait usually takes; so a wait of that length
/// takes some eight looks, and longer ones cost next to nothing.
class PollPeriod {
 public:
  using Clock = std::chrono::steady_clock;

  /// From now on. `usual`: length of such a wait; 0: not known. `longest`: between two looks.
  explicit PollPeriod(std::chrono::nanoseconds usual = {}, std::chrono::microseconds longest = kLongest)
      : longest_(longest),
        shortest_(std::clamp(part_of(usual), std::min(kShortest, longest), longest)),
        start_(Clock::now()) {}

  /// Something came: a new wait begins.
  void restart() { start_ = Clock::now(); }

  /// Until the next look.
  std::chrono::microseconds next() const { return after(Clock::now() - start_); }

  /// The same so long after the beginning. Pure.
  std::chrono::microseconds after(Clock::duration waited) const {
    return std::clamp(part_of(waited), shortest_, longest_);
  }

 private:
  static constexpr std::chrono::microseconds kShortest{50};  // a slice of DP.sync is worth a millisecond
  static constexpr std::chrono::microseconds kLongest{1000};

  static constexpr std::chrono::microseconds part_of(std::chrono::nanoseconds wait) {
    return std::chrono::duration_cast<std::chrono::microseconds>(wait / 8);
  }

  const std::chrono::microseconds longest_, shortest_;
  Clock::time_point start_;
};

}  // namespace fold3d::comm
