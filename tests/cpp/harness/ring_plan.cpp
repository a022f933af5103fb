#include "harness/ring_plan.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

namespace fold3d::test {

Plan random_plan(std::mt19937_64& random, int size) {
  Plan plan;
  plan.size = size;
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

PlannedReplica::PlannedReplica(const Plan& plan, int rank, comm::BucketSync& sync, std::uint64_t seed)
    : plan_(plan), rank_(rank), sync_(sync), random_(seed + static_cast<std::uint64_t>(rank)) {
  for (std::size_t b = 0; b < plan.counts.size(); ++b) buckets_.push_back(filled(static_cast<int>(b)));
}

void PlannedReplica::begin() { sync_.begin(++step_, plan_.gather_order); }

void PlannedReplica::collect(int number) {
  if (step_ == 1) return;
  sync_.wait_gathered(number);
  expect_complete(number, step_ - 1);
}

void PlannedReplica::reduce(int number) {
  dawdle();
  collect(number);
  at(number) = filled(number);
  sync_.reduce(at(number).collective(plan_.scale));
}

void PlannedReplica::end() {
  for (const int number : plan_.parameter_order) sync_.wait_reduced(number);
  for (const int number : plan_.parameter_order) {
    dawdle();
    sync_.gather(at(number).collective());
  }
  for (const int number : plan_.reduce_order) {
    if (!plan_.lazy || step_ == plan_.steps) sync_.wait_gathered(number);
  }
}

void PlannedReplica::expect_done() {
  for (const int number : plan_.reduce_order) expect_complete(number, step_);
  const auto expected = 2 * static_cast<std::size_t>(plan_.steps) * plan_.counts.size();
  if (sync_.take_records().size() != expected) throw std::runtime_error("wrong number of records");
}

void PlannedReplica::dawdle() {
  if (random_() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200));
}

void PlannedReplica::expect_complete(int number, std::int64_t step) const {
  const auto index = static_cast<std::size_t>(number);
  for (int owner = 0; owner < plan_.size; ++owner) {
    const auto wanted = reduced<float>(owner, plan_.size, number, step, plan_.counts[index], plan_.scale);
    if (buckets_[index].shard(owner, plan_.size) != wanted) {
      throw std::runtime_error("wrong values in bucket " + std::to_string(number) + ", step " + std::to_string(step));
    }
  }
}

TestBucket<float> PlannedReplica::filled(int number) const {
  return {number, contents<float>(rank_, number, step_, plan_.counts[static_cast<std::size_t>(number)])};
}

}  // namespace fold3d::test
