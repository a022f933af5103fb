#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/ir/schedule.h"

namespace fold3d::core {

/// Per rank, the largest number of stashed activations at any point of its list: (chunk, micro-batch) pairs
/// whose F has run and whose backward (B, or W of a split one) has not. 1F1B: min(pp - stage, m); GPipe: m;
/// AIAO: segments * m (Fold3D equation 7).
std::vector<int> peak_stash(const Schedule& schedule);

/// What a rank's list does with the stash of one (chunk, micro-batch), as positions in the list.
struct StashUse {
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  int chunk = 0;
  int micro_batch = 0;
  std::size_t forward = kNone;   ///< F
  std::size_t offload = kNone;   ///< OFFLOAD
  std::size_t prefetch = kNone;  ///< PREFETCH
  std::size_t first = kNone;     ///< the first compute action after F that needs the stash: it waits for PREFETCH
  std::size_t last = kNone;      ///< the last one: after it nothing is left
};

/// The stashes of one rank's `actions`, in the order of their forwards. Actions outside the shape are ignored.
std::vector<StashUse> stash_uses(const Shape& shape, const std::vector<Action>& actions);

/// What a rank's list does with something that a chunk takes from a neighbour: its input, or the gradient of its
/// output. As positions in the list.
struct BorderUse {
  int chunk = 0;  ///< that uses it
  int micro_batch = 0;
  bool is_gradient = false;
  bool is_message = false;                 ///< of another rank
  std::size_t there = StashUse::kNone;     ///< the RECV; else the action of this rank that makes it
  std::size_t offload = StashUse::kNone;   ///< OFFLOAD_F or OFFLOAD_B
  std::size_t prefetch = StashUse::kNone;  ///< PREFETCH_F or PREFETCH_B
  std::size_t use = StashUse::kNone;       ///< F; B, or I of a split one

  /// Of the chunk that hands it over to its next one, and gets back as much.
  int border() const { return is_gradient ? chunk : chunk - 1; }
};

/// Of one rank's `actions`, by gradient, chunk and micro-batch; those that the list has both ends of. Actions outside
/// the shape are ignored.
std::vector<BorderUse> border_uses(const Shape& shape, const std::vector<Action>& actions);

/// How much of the stashes, and of what crosses borders, is where at once, at most. OFFLOADs leave one after the other:
/// with the second after it in the list an OFFLOAD is done (double buffering; those of borders for themselves); until
/// then its bytes count on both sides, as from PREFETCH to first use. A message that has a PREFETCH is in the pool from
/// its RECV on.
struct StashPeak {
  std::int64_t device = 0;
  std::int64_t pool = 0;
};

/// OFFLOADs that may be under way on one rank: the Executor waits before it begins one more.
inline constexpr int kOffloadsUnderWay = 2;

/// Of one rank's list. `bytes`: what a stash of each chunk holds; empty: 1, which counts stashes. `sent`: what each
/// chunk hands to the next and gets back; empty: nothing.
StashPeak stash_peak(const Shape& shape, const std::vector<Action>& actions, const std::vector<std::int64_t>& bytes,
                     const std::vector<std::int64_t>& sent);

/// Of every rank.
std::vector<StashPeak> stash_peaks(const Schedule& schedule, const std::vector<std::int64_t>& bytes = {},
                                   const std::vector<std::int64_t>& sent = {});

/// Of every rank: what its pool must have however fast copies are, for a slot goes back at PREFETCH at the earliest.
std::vector<std::int64_t> least_pools(const Schedule& schedule, const std::vector<std::int64_t>& bytes,
                                      const std::vector<std::int64_t>& sent);

}  // namespace fold3d::core
