// Random plans over rings with random delays, small pipes and random orders: every sum is right to the bit, every
// gather complete, nothing hangs. FOLD3D_STRESS_RUNS sets the number of runs.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "ring_harness.h"

namespace fold3d::test {
namespace {

using namespace std::chrono_literals;
using comm::BucketSync;

#if defined(__SANITIZE_THREAD__)
constexpr int kRuns = 40;
#else
constexpr int kRuns = 150;
#endif

int stress_runs() {
  const char* const wanted = std::getenv("FOLD3D_STRESS_RUNS");
  return wanted == nullptr ? kRuns : std::atoi(wanted);
}

/// What all replicas of a run agree on.
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

Plan random_plan(std::mt19937_64& random) {
  Plan plan;
  plan.size = 2 + static_cast<int>(random() % 4);
  plan.steps = 1 + static_cast<int>(random() % 3);
  const int buckets = 1 + static_cast<int>(random() % 6);
  for (int b = 0; b < buckets; ++b) {
    plan.counts.push_back(static_cast<std::size_t>(plan.size) * (1 + random() % (random() % 4 == 0 ? 3000 : 100)));
    plan.reduce_order.push_back(b);
    (random() % 2 == 0 ? plan.gather_order : plan.parameter_order).push_back(b);
  }
  for (auto* order : {&plan.reduce_order, &plan.gather_order, &plan.parameter_order}) {
    std::shuffle(order->begin(), order->end(), random);
  }
  plan.scale = random() % 2 == 0 ? 1.0 : 1.0 / plan.size;
  plan.lazy = random() % 2 == 0;
  return plan;
}

void expect_complete(const TestBucket<float>& bucket, const Plan& plan, int number, std::int64_t step) {
  for (int owner = 0; owner < plan.size; ++owner) {
    const auto wanted =
        reduced<float>(owner, plan.size, number, step, plan.counts[static_cast<std::size_t>(number)], plan.scale);
    if (bucket.shard(owner, plan.size) != wanted) {
      throw std::runtime_error("wrong values in bucket " + std::to_string(number) + ", step " + std::to_string(step));
    }
  }
}

void run(const Plan& plan, int rank, BucketSync& sync, std::uint64_t seed) {
  std::mt19937_64 random(seed + static_cast<std::uint64_t>(rank));  // of this replica alone: its pauses
  const auto dawdle = [&] {
    if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
  };
  std::vector<TestBucket<float>> buckets;
  const auto fill = [&](int number, std::int64_t step) {
    return TestBucket<float>(number,
                             contents<float>(rank, number, step, plan.counts[static_cast<std::size_t>(number)]));
  };
  for (std::size_t b = 0; b < plan.counts.size(); ++b) buckets.push_back(fill(static_cast<int>(b), 1));
  const auto at = [&](int number) -> TestBucket<float>& { return buckets[static_cast<std::size_t>(number)]; };
  for (std::int64_t step = 1; step <= plan.steps; ++step) {
    sync.begin(step, plan.gather_order);
    for (const int number : plan.reduce_order) {
      dawdle();
      if (step > 1) {
        sync.wait_gathered(number);
        expect_complete(at(number), plan, number, step - 1);
        at(number) = fill(number, step);
      }
      sync.reduce(at(number).collective(plan.scale));
    }
    for (const int number : plan.parameter_order) sync.wait_reduced(number);
    for (const int number : plan.parameter_order) {
      dawdle();
      sync.gather(at(number).collective());
    }
    for (const int number : plan.reduce_order) {
      if (!plan.lazy || step == plan.steps) sync.wait_gathered(number);
    }
  }
  for (const int number : plan.reduce_order) expect_complete(at(number), plan, number, plan.steps);
  const auto expected = 2 * static_cast<std::size_t>(plan.steps) * plan.counts.size();
  if (sync.take_records().size() != expected) throw std::runtime_error("wrong number of records");
}

TEST(RingStress, RandomPlansWithRandomDelays) {
  const int runs = stress_runs();
  for (int index = 0; index < runs; ++index) {
    std::mt19937_64 random(static_cast<std::uint64_t>(index));
    const Plan plan = random_plan(random);
    const Replicas replicas{.size = plan.size,
                            .chunk_bytes = random() % 4 == 0 ? 0 : 64u << random() % 6,
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
