#pragma once

#include <utility>
#include <vector>

#include "core/ir/schedule.h"

namespace fold3d::core {

/// Blocks [first, end) of every chunk.
using Ranges = std::vector<std::pair<int, int>>;

/// A layer of a chunk: what runs in one piece.
struct LayerRead {
  int number = 0;  ///< 0 (prologue), 1 ... blocks, blocks + 1 (epilogue)
  std::vector<int> parameters;
};

/// Which parameters a model's layers read, by number.
struct LayerReads {
  /// By block, and last of the epilogue: the parameters that it reads; those that lie there and that no forward has
  /// read.
  std::vector<std::vector<int>> reads;
  std::vector<std::vector<int>> unread;
  std::vector<int> before;  ///< by the prologue
  std::vector<int> by_all;  ///< by every chunk

  int blocks() const { return static_cast<int>(reads.size()) - 1; }

  /// The layers of a chunk in forward order with all that each reads. The first one also has what every chunk reads,
  /// and what no forward has read of all that lies in the chunk.
  std::vector<LayerRead> of_chunk(const std::pair<int, int>& range) const;

  /// The parameters whose gradients each layer of each chunk completes, in the order in which it reads them: each in
  /// the first layer of its stage that needs it, whose last backward completes its gradient. Frozen ones, too. A
  /// parameter that two stages need is on both. What no forward has read is in the first layer of its stage: any of the
  /// stage's layers may read it one day. Throws std::invalid_argument unless `ranges` are chunks of the model.
  std::vector<std::vector<LayerRead>> completed(const Ranges& ranges, int pp, Style style) const;

 private:
  std::vector<int> unread_in(const std::pair<int, int>& range) const;
};

}  // namespace fold3d::core
