#pragma once

#include <cstdint>
#include <vector>

#include "core/sim/cluster_model.h"

namespace fold3d::core {

/// A part of a chunk whose gradients are summed together. Times are offsets into the chunk's forward or backward of one
/// micro-batch, without ClusterModel::action_ns.
struct Bucket {
  int chunk = 0;
  int local = 0;  ///< number among the buckets of its stage, in forward order
  std::int64_t forward_begin = 0;
  std::int64_t forward_end = 0;
  std::int64_t backward_part = 0;  ///< of backward_total, after which its gradients are complete
  std::int64_t backward_total = 0;
  std::int64_t bytes = 0;
  std::int64_t update_ns = 0;  ///< optimizer on one rank, all of it
  bool early = false;          ///< its gradients are gathered, and by leave of ClusterModel::gather_order
  bool zero1 = false;          ///< its parameters are gathered, after the norm
};

/// The buckets of all chunks, numbered chunk by chunk in forward order.
class SimulatedBuckets {
 public:
  SimulatedBuckets(const Shape& shape, const ClusterModel& model);

  /// Buckets of `chunk`: numbers [first, end).
  int first(int chunk) const { return first_[static_cast<std::size_t>(chunk)]; }
  int end(int chunk) const { return first_[static_cast<std::size_t>(chunk) + 1]; }
  int size() const { return static_cast<int>(buckets_.size()); }
  const Bucket& operator[](int number) const { return buckets_[static_cast<std::size_t>(number)]; }
  /// The numbers of the stage's buckets, in forward order.
  const std::vector<int>& of_stage(int stage) const { return stages_[static_cast<std::size_t>(stage)]; }
  /// When the bucket's gradients are complete, in a backward of its chunk that takes `duration`.
  std::int64_t produced_after(int number, std::int64_t duration) const;
  /// The replica's share of a zero1 bucket's update.
  std::int64_t share_of_update(int number) const { return (*this)[number].update_ns / dp_; }

 private:
  void add_chunk(const ClusterModel& model, int chunk, const std::vector<BucketModel>& parts);

  Shape shape_;
  int dp_;
  std::vector<Bucket> buckets_;
  std::vector<int> first_;
  std::vector<std::vector<int>> stages_;
};

}  // namespace fold3d::core
