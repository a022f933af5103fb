#pragma once

#include <algorithm>
#include <cstdint>

namespace fold3d::core {

/// How a library's collectives (NCCL's) are cut into slices where messages of the pipeline take the same cards, and how
/// long a slice may be held back for one. All replicas must cut alike, and a slice moves nothing before the last of
/// them has launched it; so all of this is a function of numbers on which they agreed. Pure.
///
/// Speeds are what a replica sends of collectives in a second, in bytes; 0: nobody has measured it.
class SliceRule {
 public:
  /// Bytes that each of `replicas` (at least 2) sends in a slice: what takes a millisecond, so that a message finds
  /// little ahead of it, but no less for each of the others than with what a library is fast. On a slow network, where
  /// messages would wait for that longer than five milliseconds, less will do.
  static std::int64_t bytes(int replicas, double speed) {
    const double known = std::min(speed > 0 ? speed : kFirstSpeed, kMost / kSeconds);
    const auto in_time = [known](double seconds) { return static_cast<std::int64_t>(known * seconds + 0.5); };
    const std::int64_t others = replicas - 1;
    // Before anybody has measured a slow network there is none: the first slices are few.
    const std::int64_t slow = speed > 0 ? others * kLeastWhereSlow : others * kLeastForReplica;
    const std::int64_t least = std::clamp(in_time(kSlowSeconds), slow, others * kLeastForReplica);
    return std::max(in_time(kSeconds), least);
  }

  /// Elements of each shard that go in a slice of so many bytes that a replica sends, `wire_bytes` for each element,
  /// one at least: whole lines of memory, if it has any. Every slice then begins where a library's kernels read and
  /// write 16 bytes at a time, which they do only where all their addresses are multiples of that.
  static constexpr std::int64_t shard_length(std::int64_t bytes, int replicas, std::int64_t wire_bytes) {
    const std::int64_t length = bytes / ((replicas - 1) * wire_bytes);
    return length < kLine ? std::max<std::int64_t>(length, 1) : length / kLine * kLine;
  }

  /// Nanoseconds for which a slice of so many bytes may be held back: so many times what it takes by itself. The
  /// longest hold among the replicas counts, whichever it is; so DP.sync gets its share whatever their number.
  static std::int64_t longest_hold_ns(std::int64_t bytes, double speed) {
    const double alone_ns = static_cast<double>(bytes) / (speed > 0 ? speed : kFirstSpeed) * 1e9;
    return static_cast<std::int64_t>(kPatience * std::min(alone_ns, kLongestSliceNs));
  }

  /// Whether the replicas agree on the speed anew before their `number`-th collective, from 1: often while little is
  /// known, rarely later.
  static bool agrees_before(std::int64_t number) {
    if (number < kFirstAgreement) return false;
    return number % kRarest == 0 || (number < kRarest && (number & (number - 1)) == 0);
  }

  /// Holds of a slice, by what it takes alone: DP.sync has 1 / (1 + kPatience) of the time at least.
  static constexpr double kPatience = 4;

 private:
  static constexpr std::int64_t kLine = 64;  // elements; shards begin at multiples of as many
  static constexpr double kSeconds = 1e-3;
  static constexpr double kFirstSpeed = (4 << 20) / kSeconds;
  static constexpr double kSlowSeconds = 5e-3;
  static constexpr std::int64_t kLeastForReplica = 256 << 10;
  static constexpr std::int64_t kLeastWhereSlow = 32 << 10;  // where small slices are slow, slices must not shrink on
  static constexpr std::int64_t kMost = 64 << 20;            // what is rounded of a slice must have room
  static constexpr double kLongestSliceNs = 1e9;             // beyond it a speed is not believed
  static constexpr std::int64_t kFirstAgreement = 4;         // before it the library still connects ranks
  static constexpr std::int64_t kRarest = 1024;
};

}  // namespace fold3d::core
