#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "comm/arbiter/nic_arbiter.h"
#include "comm/base/moment.h"
#include "comm/base/number.h"
#include "comm/base/tensor.h"

namespace fold3d::comm {

/// A reduce-scatter or an all-gather of one bucket over the replicas of a stage, in place. Shard r of the bucket, the
/// r-th of as many equal parts as there are replicas, belongs to replica r.
///
/// Reduce-scatter: afterwards shard r holds, on replica r, the sum over all replicas times `scale`; the other shards
/// hold nothing of use. All-gather: afterwards every shard holds what its owner had in it.
struct Collective {
  std::int64_t step = 0;
  int bucket = 0;
  std::shared_ptr<Buffer> buffer;  ///< nobody else touches its memory until the collective is complete
  std::uint8_t element_bytes = 1;
  Number element = Number::kOther;  ///< of a reduce-scatter: kFloat32 or kFloat64
  double scale = 1.0;               ///< of a reduce-scatter
  /// float32 elements travel rounded to bfloat16, and are added in float32. A reduce-scatter ends with sums that are
  /// rounded, too, so that an all-gather of them changes nothing; one of other values gives them rounded to all but
  /// their owner.
  bool as_bfloat16 = false;
  /// Of an all-gather: the buffer of a reduce-scatter of the same memory that was usable, but perhaps not over, before
  /// this began; null: there is none.
  std::shared_ptr<Buffer> sums = nullptr;

  /// Bytes of an element on its way.
  std::size_t wire_bytes() const { return as_bfloat16 ? 2 : element_bytes; }
};

/// One collective as it happened on one rank; times are std::chrono::steady_clock nanoseconds.
struct CollectiveRecord {
  NicArbiter::Traffic traffic = NicArbiter::Traffic::kReduce;
  int bucket = 0;
  std::int64_t start_ns = 0;  ///< its first slice began to be sent or received
  std::int64_t end_ns = 0;
  std::size_t bytes = 0;                           ///< sent by this rank
  std::shared_ptr<LaterInterval> times = nullptr;  ///< the device's own, in the place of those above; null: it has none
};

/// "reduce of bucket 3 (step 7)".
std::string name_of(NicArbiter::Traffic traffic, const Collective& collective);

/// Throws std::invalid_argument when the bucket is empty or cannot be cut into `size` equal shards of whole elements,
/// or when its elements cannot be summed, or not be rounded.
void check_collective(NicArbiter::Traffic traffic, const Collective& collective, int size);

}  // namespace fold3d::comm
