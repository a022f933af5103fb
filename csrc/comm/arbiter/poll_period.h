#pragma once

#include <algorithm>
#include <chrono>

namespace fold3d::comm {

/// How long to wait between two looks at what wakes nobody, such as a mark in a device's stream: the wait that a device
/// has for one knows no time limit, ends for no failure of another rank, and may keep a core busy. A look comes late by
/// an eighth of the time waited so far at most, and long waits cost next to nothing.
class PollPeriod {
 public:
  using Clock = std::chrono::steady_clock;

  /// From now on. `longest`: between two looks.
  explicit PollPeriod(std::chrono::microseconds longest = std::chrono::milliseconds(1))
      : longest_(longest), start_(Clock::now()) {}

  /// Something came: a new wait begins.
  void restart() { start_ = Clock::now(); }

  /// Until the next look.
  std::chrono::microseconds next() const { return after(Clock::now() - start_); }

  /// The same so long after the beginning. Pure.
  std::chrono::microseconds after(Clock::duration waited) const {
    const auto part = std::chrono::duration_cast<std::chrono::microseconds>(waited / kPart);
    return std::clamp(part, kShortest, longest_);
  }

 private:
  static constexpr std::chrono::microseconds kShortest{50};  // a slice of DP.sync is worth a millisecond
  static constexpr int kPart = 8;

  const std::chrono::microseconds longest_;
  Clock::time_point start_;
};

}  // namespace fold3d::comm
