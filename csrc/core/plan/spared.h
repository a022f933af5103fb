#pragma once

#include <vector>

#include "core/ir/schedule.h"

namespace fold3d::core {

/// What one chunk computes again in its backward: nothing, where no field is set.
struct Choice {
  bool full = false;  ///< all of it: its forward keeps what it was given, and no graph
  int every = 0;      ///< of the blocks of a stage every so many, by itself; 1: each
  int inside = -1;    ///< modules inside of blocks: number in PlanJob::inside, or any other if nothing is known of them

  bool nothing() const { return *this == Choice{}; }
  /// Whether it keeps nothing but what it, or each of its blocks, was given.
  bool keeps_boundaries() const { return full || every == 1; }
  bool operator==(const Choice&) const = default;
};

/// What is computed again instead of kept, and what leaves the device between forward and backward.
struct Spared {
  enum class Leaves { kNothing, kBoundaries, kActivations };

  std::vector<Choice> again = {Choice{}};  ///< one for all chunks, or one for each
  Leaves leaves = Leaves::kNothing;        ///< boundaries: of chunks that keep nothing else
  int percent = 100;                       ///< of the micro-batches, whose stashes leave

  bool recomputes() const;
  /// Whether something is computed again by blocks or inside of them: their backwards do not run in halves.
  bool rebuilds_blocks() const;
  /// In how many ways memory is spared: by recomputation, by what leaves.
  int ways() const { return (recomputes() ? 1 : 0) + (leaves == Leaves::kNothing ? 0 : 1); }
  bool nothing() const { return ways() == 0; }
  /// Throws std::invalid_argument where it is said of another number of chunks.
  std::vector<Choice> of_chunks(int chunks) const;
  /// Of each chunk whether it keeps no graph. A model that is one chunk recomputes block by block: its backward follows
  /// its forward.
  std::vector<bool> without_graph(int chunks) const;
  /// Of each chunk whether its stashes leave; empty where none does.
  std::vector<bool> offloaded(int chunks) const;
  /// By chunk the places within it of the blocks that recompute each by itself. counts: blocks of every chunk.
  std::vector<std::vector<bool>> recomputed_places(const std::vector<int>& counts, const Shape& shape) const;
  bool operator==(const Spared&) const = default;
};

}  // namespace fold3d::core
