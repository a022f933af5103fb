// The simulator's copies to the pool and back: free, hidden, late.
#include <gtest/gtest.h>

#include "core/generators/registry.h"
#include "core/ir/stash.h"
#include "core/passes/lower.h"
#include "core/sim/simulate.h"

namespace fold3d::core {
namespace {

constexpr std::int64_t kForward = 1'000'000;
constexpr std::int64_t kBackward = 2'000'000;

Schedule offloaded(int pp, int segments, int micro_batches) {
  const Schedule compute = generate("aiao", {Shape{pp, segments, micro_batches}, 0, ""});
  return lower(compute, {.offload = std::vector<bool>(static_cast<std::size_t>(pp * segments), true)});
}

/// A byte of a copy takes a nanosecond.
ClusterModel model_of(const Schedule& schedule, std::int64_t stash_bytes) {
  const auto chunks = static_cast<std::size_t>(schedule.shape.num_chunks());
  ClusterModel model;
  model.forward_ns.assign(chunks, kForward);
  model.backward_ns.assign(chunks, kBackward);
  model.layers.assign(chunks, 1);
  model.activation_bytes.assign(chunks, 0);
  model.gradient_bytes.assign(chunks, 0);
  model.stash_bytes.assign(chunks, stash_bytes);
  model.copy_bandwidth = 1e9;
  return model;
}

TEST(SimulateCopies, ThoseThatFitUnderTheComputationCostNothing) {
  for (const bool share : {false, true}) {
    for (const int pp : {1, 2, 4}) {
      const Schedule made = offloaded(pp, 2, 8);
      ClusterModel model = model_of(made, kForward / 2);
      model.copies_share = share;
      const TrainingStep step = simulate_step(made, model);
      model.stash_bytes.clear();
      EXPECT_EQ(step.step_ns, simulate_step(made, model).step_ns);
      EXPECT_EQ(step.ranks[0].exposed_offload_ns, 0);
    }
  }
}

TEST(SimulateCopies, ALinkThatIsTooSlowIsWhatTheStepTakes) {
  // One rank, one direction at a time: every stash that moves goes through the link twice.
  const Schedule made = offloaded(1, 4, 16);
  ClusterModel model = model_of(made, 4 * kForward);
  model.copies_share = true;
  const TrainingStep step = simulate_step(made, model, {.spans = true});
  std::int64_t moved = 0;
  for (const SimulatedSpan& span : step.spans) {
    if (span.lane == SimulatedSpan::Lane::kOffload || span.lane == SimulatedSpan::Lane::kPrefetch) moved += span.bytes;
  }
  EXPECT_GT(moved, 0);
  EXPECT_GE(step.step_ns, moved);
  EXPECT_LE(step.step_ns, moved + 4 * (kForward + kBackward));
  const RankBreakdown& rank = step.ranks[0];
  EXPECT_GT(rank.exposed_offload_ns, 0);
  EXPECT_EQ(rank.compute_ns + rank.bubble_ns + rank.exposed_pp_ns + rank.exposed_dp_ns + rank.exposed_offload_ns,
            step.step_ns);
}

TEST(SimulateCopies, NoBackwardBeginsBeforeItsStashIsBackAndNoThirdOffloadUnderTwo) {
  const Schedule made = offloaded(2, 2, 8);
  const TrainingStep step = simulate_step(made, model_of(made, 3 * kForward), {.spans = true});
  int checked = 0;
  for (const SimulatedSpan& copy : step.spans) {
    if (copy.lane != SimulatedSpan::Lane::kPrefetch) continue;
    for (const SimulatedSpan& computed : step.spans) {
      if (computed.lane != SimulatedSpan::Lane::kCompute || computed.action.kind != Kind::kBackward) continue;
      if (computed.action.chunk != copy.action.chunk || computed.action.micro_batch != copy.action.micro_batch)
        continue;
      EXPECT_GE(computed.start_ns, copy.end_ns);
      ++checked;
    }
  }
  EXPECT_EQ(checked, 32);
}

TEST(SimulateCopies, ModelsThatDoNotFitAreRefused) {
  const Schedule made = offloaded(1, 2, 4);
  ClusterModel model = model_of(made, 1);
  model.stash_bytes = {1};
  EXPECT_THROW(simulate_step(made, model), std::invalid_argument);
  model = model_of(made, 1);
  for (const double rate : {0.0, 1e-300}) {  // times of the latter are no nanoseconds of 64 bits
    model.copy_bandwidth = rate;
    EXPECT_THROW(simulate_step(made, model), std::invalid_argument);
  }
}

}  // namespace
}  // namespace fold3d::core
