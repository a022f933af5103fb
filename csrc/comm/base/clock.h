#pragma once

#include <chrono>
#include <cstdint>

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

}  // namespace fold3d::comm
