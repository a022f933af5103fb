#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/ir/schedule.h"

namespace fold3d::core {

/// What a chunk needs, in bytes; of one micro-batch where it says so.
struct ChunkBytes {
  std::int64_t weights = 0;    ///< parameters and buffers
  std::int64_t gradients = 0;  ///< of its trainable parameters, as they are summed
  std::int64_t optimizer = 0;  ///< state that the rank keeps
  std::int64_t inputs = 0;     ///< a micro-batch: what the chunk before hands over, and, as a gradient, gets back
  std::int64_t saved = 0;      ///< a micro-batch: what a forward keeps for its backward, beside the inputs
  std::int64_t kept = 0;       ///< a micro-batch: what is kept beside the inputs where the forward is computed again
  /// A micro-batch: most at any moment of a forward, beside inputs; what it keeps included.
  std::int64_t forward = 0;
  std::int64_t backward = 0;  ///< likewise, of a backward; beside the gradient that arrived, too
};

/// What the last chunk needs of a micro-batch where the head's backward follows its forward (core/passes/head.h): in
/// the place of what it has of the same name.
struct HeadBytes {
  std::int64_t gradients = 0;  ///< those of ChunkBytes::gradients that are there with the first forward
  std::int64_t saved = 0;      ///< the gradient of what the last block returned included
  std::int64_t forward = 0;    ///< the head's backward included
  std::int64_t backward = 0;
};

/// Messages of one direction that may arrive before a receiver's program comes to them.
inline constexpr int kReceiveAhead = 4;

/// What the stages of a replica need. `chunks` has Shape::num_chunks() entries.
struct MemoryModel {
  std::vector<ChunkBytes> chunks;
  std::vector<std::int64_t> host;    ///< by stage: what lies in host memory all the time; empty = nothing
  std::vector<std::int64_t> update;  ///< by stage: what the optimizer's step needs beside its state; empty = nothing
  bool gradients_stay = true;        ///< else they come with a chunk's first backward and go before the next step
  int receive_ahead = kReceiveAhead;
  std::optional<HeadBytes> head{};  ///< none: the head cannot be parted from the body, and logits wait

  /// Throws std::invalid_argument naming what does not fit, or is negative.
  void check(const Shape& shape) const;
};

}  // namespace fold3d::core
