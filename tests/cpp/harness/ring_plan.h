#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "comm/bucket/bucket_sync.h"
#include "harness/ring_harness.h"

namespace fold3d::test {

/// DP.sync as all replicas of a stage agree on it.
struct Plan {
  int size = 2;
  int steps = 1;
  std::vector<std::size_t> counts;   // elements of each bucket
  std::vector<int> reduce_order;     // all buckets
  std::vector<int> gather_order;     // the early ones
  std::vector<int> parameter_order;  // the others
  double scale = 1.0;
  bool lazy = false;  // gathers run into the next step
};

Plan random_plan(std::mt19937_64& random, int size);

/// One replica that carries out a plan, with pauses of its own, and checks every gather: what it brought is the sum
/// over the replicas, to the bit. Each step: begin(), reduce() of every bucket in the plan's order, end(). One thread.
class PlannedReplica {
 public:
  /// `seed` of the pauses.
  PlannedReplica(const Plan& plan, int rank, comm::BucketSync& sync, std::uint64_t seed);

  void begin();
  /// Needs the bucket as the step before gathered it: waits for it and checks it. Nothing in the first step.
  void collect(int number);
  /// Collects the bucket, fills it with this step's gradients and reduces it.
  void reduce(int number);
  /// Gathers what is not gathered early; waits for all gathers unless the plan is lazy.
  void end();
  /// After the last step: every bucket is right, and so is the number of records.
  void expect_done();

 private:
  void dawdle();
  void expect_complete(int number, std::int64_t step) const;
  TestBucket<float> filled(int number) const;
  TestBucket<float>& at(int number) { return buckets_[static_cast<std::size_t>(number)]; }

  const Plan& plan_;
  const int rank_;
  comm::BucketSync& sync_;
  std::mt19937_64 random_;
  std::int64_t step_ = 0;
  std::vector<TestBucket<float>> buckets_;
};

}  // namespace fold3d::test
