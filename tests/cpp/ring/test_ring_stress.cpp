// Random plans over rings with random delays, small pipes and random orders: every sum is right to the bit, every
// gather complete, nothing hangs. FOLD3D_STRESS_RUNS sets the number of runs.
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <string>

#include "harness/ring_harness.h"
#include "harness/ring_plan.h"
#include "harness/stress.h"

namespace fold3d::test {
namespace {

using comm::BucketSync;

void run(const Plan& plan, int rank, BucketSync& sync, std::uint64_t seed) {
  PlannedReplica replica(plan, rank, sync, seed);
  for (int step = 1; step <= plan.steps; ++step) {
    replica.begin();
    for (const int number : plan.reduce_order) replica.reduce(number);
    replica.end();
  }
  replica.expect_done();
}

TEST(RingStress, RandomPlansWithRandomDelays) {
  const int runs = stress_runs(150, 40);
  for (int index = 0; index < runs; ++index) {
    std::mt19937_64 random(static_cast<std::uint64_t>(index));
    const Plan plan = random_plan(random, 2 + static_cast<int>(random() % 4));
    const Replicas replicas{.size = plan.size,
                            .slice_bytes = random() % 4 == 0 ? 0 : 64u << random() % 6,
                            .loopback = {.capacity = 1u << (3 + random() % 12),
                                         .max_delay = std::chrono::microseconds(random() % 3 * 100),
                                         .seed = random()},
                            .over_tcp = random() % 8 == 0};
    const std::uint64_t seed = random();
    const auto errors = replicas.run([&](int rank, BucketSync& sync) { run(plan, rank, sync, seed); });
    for (const std::string& error : errors) ASSERT_EQ(error, "") << "run " << index << ", size " << plan.size;
  }
}

}  // namespace
}  // namespace fold3d::test
