#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/plan/plan_job.h"
#include "core/plan/spared.h"

namespace fold3d::core {

/// Times that segments shall have, relative to each other.
struct Shares {
  /// Of the first segment. Less than 1 makes the reduce-scatters and gathers short that the next step waits for; more
  /// than 1 lets it hide more gathers.
  double first = 1;
  double last = 1;    ///< of the last segment; less than 1 lets the first reduce-scatters begin earlier
  bool grow = false;  ///< the others grow evenly from the first to the last; else they have 1
};

/// Consecutive layers of a chunk whose gradients are summed together.
struct BucketCost {
  double forward = 0;  ///< seconds of one micro-batch
  double backward = 0;
  std::int64_t bytes = 0;  ///< of gradients
  bool operator==(const BucketCost&) const = default;
};

/// What a chunk needs for one micro-batch, beside its inputs (core/memory/memory_model.h).
struct Activations {
  std::int64_t saved = 0;
  std::int64_t forward = 0;
  std::int64_t backward = 0;
};

/// Of consecutive layers as one chunk. arriving: bytes of the gradient that their backward begins with; 0 for the
/// model's last chunk.
Activations activations_of(const std::vector<LayerBytes>& layers, std::int64_t arriving);

/// Of the model's last chunk where the backward of the head, its last layer, is a part of the forward. ends: bytes of
/// what the last block returns, and of its gradient, which is kept in the place of all that the head saved.
Activations with_head_done(const std::vector<LayerBytes>& layers, std::int64_t ends);

/// Of a layer whose forward runs again in its backward: it keeps only what it hands on, and the sums of TP.sync.
LayerBytes recomputed(const LayerBytes& layer, std::int64_t handed_on, std::int64_t sums);

/// The layers [first, end) of each bucket, in forward order. Layers join from the first one on until a bucket has at
/// least `least_bytes`; what is left at the end and has less joins the last bucket. So the bucket with the first
/// layers, whose reduce-scatter comes last and is hidden least, is as small as the rule allows. None if no layer has
/// gradients. Throws std::invalid_argument for a negative number.
std::vector<std::pair<int, int>> cut_buckets(const std::vector<std::int64_t>& layer_bytes, std::int64_t least_bytes);

/// Blocks of every chunk: segments by `shares`, each cut into stages of about equal time. Stages of one segment work
/// side by side, so a difference between them is idle time; a difference between segments is not. Throws
/// std::invalid_argument if there are fewer than pp * segments places to cut.
Ranges cut(const PlanJob& job, int segments, const Shares& shares = {});

/// What every chunk and bucket costs when the model is cut in a given way. Vectors are by chunk.
struct Layout {
  Ranges ranges;
  Style style = Style::kLoop;  ///< on which stages the chunks live
  std::int64_t bucket_bytes = 0;
  Spared spared;
  std::vector<double> forward;
  std::vector<double> backward;
  std::vector<double> forward_tp;
  std::vector<double> backward_tp;
  std::vector<double> update;
  std::vector<std::vector<BucketCost>> buckets;
  std::vector<std::int64_t> activation_bytes;
  std::vector<std::int64_t> stash_bytes;  ///< empty where nothing leaves
  std::vector<Activations> activations;
  bool parts_head = false;  ///< the head shares no parameter with the rest of the last chunk
  Activations parted;       ///< of the last chunk where the head's backward is in its forward
  double head = 0;          ///< seconds of that backward
  std::int64_t head_gradient_bytes = 0;
  std::vector<std::int64_t> kept;  ///< beside inputs, if the forward runs again as a whole
  std::vector<std::int64_t> parameter_bytes;
  std::vector<std::int64_t> trainable_bytes;
  std::vector<std::int64_t> largest_gradient;

  int chunks() const { return static_cast<int>(ranges.size()); }
  std::int64_t largest_message() const;
  /// Number of a stage's buckets.
  int buckets_of(int stage, int pp) const;
};

/// Blocks that recompute each by itself are part of their chunk's backward; chunks that recompute as a whole cost what
/// they do without: their RECOMPUTE is an action of its own. Throws std::invalid_argument when `spared` is said of
/// another number of chunks, or `ranges` are not chunks of the model.
Layout layout_of(const PlanJob& job, const Ranges& ranges, std::int64_t bucket_bytes, const Spared& spared = {});

/// `layout_of` for each size of buckets: nothing but these differ. Of equal buckets the first only.
std::vector<Layout> layouts_of(const PlanJob& job, const Ranges& ranges, const std::vector<std::int64_t>& sizes,
                               const Spared& spared);

}  // namespace fold3d::core
