#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/ir/schedule.h"

namespace fold3d::core {

/// Proves a schedule right, compute-only or lowered; returns if it is. Throws std::invalid_argument
/// otherwise, with what is wrong and the grid with the offending cell marked. Checked in this order:
///   1. every action lies inside the shape, on the rank of its chunk, and occurs once;
///   2. nothing is missing: F, and B or both I and W, of every chunk and micro-batch; if there is any SEND or
///      RECV, every one that a stage border needs; if there is any REDUCE_GRAD, one per chunk.
///      RECOMPUTE may be there or not; of OFFLOAD and PREFETCH none or both of a chunk and micro-batch, and so of
///      those of a border, unless a message crosses it: then PREFETCH_F or PREFETCH_B alone.
///      forward_only (evaluation): every F, and nothing backward;
///   3. every action can run in the order of the lists by the rule of core/deps.h, where SEND and RECV both
///      block until they meet (rendezvous). So there is no deadlock, and REDUCE_GRAD comes after the last
///      backward of its chunk.
void validate(const Schedule& schedule, bool forward_only = false);

/// Proves steps of `micro_batches` each that follow each other in one schedule without a flush: as validate(), where a
/// forward also waits for the weights of its step (version_waits(), core/ir/versions.h).
void validate_steps(const Schedule& steps, int micro_batches);

/// Limits of stash_peaks() (core/ir/stash.h), of each rank.
struct Room {
  std::optional<std::int64_t> device;          ///< none: any number
  std::optional<std::int64_t> pool;            ///< likewise
  std::vector<std::int64_t> stash_bytes = {};  ///< of each chunk; empty: device and pool are numbers of stashes
  std::vector<std::int64_t> sent_bytes = {};  ///< that each chunk hands to the next, and gets back; empty: do not count
};

/// Proves that stashes, and what crosses borders, have room at every moment of a valid schedule. Throws
/// std::invalid_argument that names the first rank that lacks it, what it needs and what there is.
void validate_room(const Schedule& schedule, const Room& room);

}  // namespace fold3d::core
