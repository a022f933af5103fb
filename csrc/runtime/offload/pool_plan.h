// PoolPlan: how much of what a program has in the pool at once, as far as sizes are known.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "core/ir/schedule.h"
#include "memory/host_pool.h"

namespace fold3d::runtime {

/// begin() and peak() are called by the thread that walks the program; make_room() by any.
class PoolPlan {
 public:
  /// A run of `program` begins. Sizes stay known.
  void begin(const core::Shape& shape, const std::vector<core::Action>& program);

  /// Bytes of the pool that the program begun needs at the same time, at most; none before all sizes have been seen.
  std::optional<std::int64_t> peak() const;

  /// What `action`, an OFFLOAD or a RECV, takes to the pool has so many bytes: where that is more than known, reserves
  /// room for all of its kind and chunk in a pool that grows.
  void make_room(memory::HostPool& pool, const core::Action& action, std::size_t bytes);

 private:
  static constexpr std::int64_t kUnknown = -1;

  /// Of a chunk's stashes, inputs or gradients.
  struct Kept {
    std::int64_t at_once = 0;         ///< in the pool, at most
    std::int64_t largest = kUnknown;  ///< bytes, in pages
  };
  using ByChunk = std::vector<Kept>;
  enum What : std::size_t { kStash, kInput, kGradient };
  static What what_of(core::Kind kind);

  core::Shape shape_{};
  std::vector<core::Action> program_;
  mutable std::mutex mutex_;
  std::array<ByChunk, 3> kept_;
};

}  // namespace fold3d::runtime
