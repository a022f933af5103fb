#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace fold3d::comm {

/// How often a long wait looks whether its thread is wanted elsewhere, as by a signal.
inline constexpr std::chrono::milliseconds kLook{100};

/// The clock of every record and deadline, in nanoseconds.
inline std::int64_t now_ns() {
  using std::chrono::steady_clock;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

inline std::chrono::steady_clock::time_point time_point_of(std::int64_t ns) {
  using std::chrono::steady_clock;
  return steady_clock::time_point(std::chrono::duration_cast<steady_clock::duration>(std::chrono::nanoseconds(ns)));
}

/// "2.500 s".
inline std::string seconds(std::chrono::milliseconds time) {
  const std::string fraction = std::to_string(1000 + time.count() % 1000).substr(1);
  return std::to_string(time.count() / 1000) + "." + fraction + " s";
}

/// A setting in seconds as a time limit.
inline std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

}  // namespace fold3d::comm
