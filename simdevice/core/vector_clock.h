#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace simdevice {

/// What of every stream has happened before some point: one tick per launch of a stream, indexed by its number.
class VectorClock {
 public:
  /// Takes in what `other` has seen.
  void join(const VectorClock& other) {
    if (ticks_.size() < other.ticks_.size()) ticks_.resize(other.ticks_.size(), 0);
    for (std::size_t i = 0; i < other.ticks_.size(); ++i) ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
  }

  /// Counts a launch of the stream; returns its tick, from 1.
  std::uint64_t advance(std::size_t stream) {
    if (ticks_.size() <= stream) ticks_.resize(stream + 1, 0);
    return ++ticks_[stream];
  }

  bool has_seen(std::size_t stream, std::uint64_t tick) const {
    return stream < ticks_.size() && ticks_[stream] >= tick;
  }

 private:
  std::vector<std::uint64_t> ticks_;
};

}  // namespace simdevice
