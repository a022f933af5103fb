// The passes of lowering: each adds one kind of action to a schedule. Their order stands in core/passes/lower.cpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "core/ir/schedule.h"

namespace fold3d::core {

/// What a schedule gets beside sends and receives. Default: nothing.
struct LoweringOptions {
  bool reduce = false;  ///< the replicas sum gradients
  /// Of every chunk: no graph is kept between forward and backward; empty: all keep it.
  std::vector<bool> recompute = {};
  /// Of every chunk, whether its stashes leave the device where they have the time; empty: none.
  std::vector<bool> offload = {};
  /// Of the stashes of these chunks as many leave, in (0, 1]; spread evenly over the micro-batches, so that copies are.
  double offload_share = 1;
  /// What a chunk takes from another one, and does not use soon, waits in the pool: it leaves the device, or a message
  /// lands there in the first place (lazy inter-segment communication, Fold3D V-C).
  bool lazy = false;
  /// Compute actions that what is in the pool comes ahead of its use, >= 1. Two: copies the other way may be in its
  /// way.
  int prefetch_distance = 2;
};

/// Takes a schedule that is valid and that the passes before have seen.
using Pass = Schedule (*)(const Schedule&, const LoweringOptions&);

namespace passes {

/// What waits for fewer compute actions than these stays where it is: one for the way out, at least one for the way
/// back, one to spare.
inline constexpr std::size_t kSoon = 3;

/// How many compute actions ahead of its use comes back what waits for `wait` of them, kSoon or more.
constexpr std::size_t ahead_of_use(std::size_t wait, const LoweringOptions& options) {
  return std::min(static_cast<std::size_t>(options.prefetch_distance), wait - (kSoon - 1));
}

/// core/passes/send_recv.cpp. Keeps compute actions only, and adds SEND and RECV.
Schedule send_recv(const Schedule& compute_only, const LoweringOptions& options);

/// core/passes/recompute.cpp. Adds RECOMPUTE where asked.
Schedule recompute(const Schedule& lowered, const LoweringOptions& options);

/// core/passes/reduce.cpp. Adds REDUCE_GRAD where asked.
Schedule reduce(const Schedule& lowered, const LoweringOptions& options);

/// core/passes/offload.cpp. Adds OFFLOAD and PREFETCH where asked, and where a stash waits long enough.
Schedule offload(const Schedule& lowered, const LoweringOptions& options);

/// core/passes/lazy.cpp. Adds OFFLOAD and PREFETCH of what crosses chunk borders where asked, and where it waits long
/// enough.
Schedule lazy(const Schedule& lowered, const LoweringOptions& options);

}  // namespace passes
}  // namespace fold3d::core
