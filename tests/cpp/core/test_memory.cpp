// The memory of simulated steps against closed forms.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>

#include "core/generators/registry.h"
#include "core/ir/stash.h"
#include "core/memory/memory_curve.h"
#include "core/passes/lower.h"
#include "core/sim/simulate.h"

namespace fold3d::core {
namespace {

constexpr std::int64_t kKept = 1'000, kSent = 10, kWork = 100'000;

/// Chunks that keep kKept of a micro-batch and send kSent.
MemoryModel even(const Shape& shape) {
  MemoryModel model;
  model.gradients_stay = false;
  for (int chunk = 0; chunk < shape.num_chunks(); ++chunk) {
    ChunkBytes bytes;
    bytes.inputs = chunk > 0 ? kSent : 0;
    bytes.saved = bytes.forward = bytes.backward = kKept;
    model.chunks.push_back(bytes);
  }
  return model;
}

/// `stash_bytes`: of every chunk, copied at a byte per microsecond; 0: copies are free.
std::vector<StageMemory> curves_of(const Schedule& schedule, const MemoryModel& model, std::int64_t stash_bytes = 0) {
  const auto chunks = static_cast<std::size_t>(schedule.shape.num_chunks());
  ClusterModel cluster;
  cluster.forward_ns.assign(chunks, 1'000'000);
  cluster.backward_ns.assign(chunks, 2'000'000);
  cluster.activation_bytes.assign(chunks, 0);
  cluster.layers.assign(chunks, 1);
  cluster.gradient_bytes.assign(chunks, 0);
  if (stash_bytes > 0) cluster.stash_bytes.assign(chunks, stash_bytes);
  cluster.copy_bandwidth = 1e6;
  const TrainingStep step = simulate_step(schedule, cluster, {8, false, true});
  return memory_curves(schedule, model, compute_times(step, schedule.shape), copy_times(step, schedule.shape));
}

std::int64_t use(const MemoryPoint& point, MemoryUse what) { return point.uses[static_cast<std::size_t>(what)]; }

std::int64_t most(const StageMemory& memory, MemoryUse what) {
  std::int64_t found = 0;
  for (const MemoryPoint& point : memory.points) found = std::max(found, use(point, what));
  return found;
}

template <class Check>
void for_each_case(Check check) {
  for (const SchedulerInfo& info : registry()) {
    for (const int pp : {1, 2, 4}) {
      for (const int segments : {1, 2}) {
        for (const int m : {1, 3, 8}) {
          if (info.allows(segments)) check(generate(info.name, {{pp, segments, m}, 0, ""}), info.name);
        }
      }
    }
  }
}

TEST(CoreMemory, WhatForwardsKeepIsTheStashThatTheSchedulePromises) {
  for_each_case([](const Schedule& schedule, const std::string& name) {
    const std::vector<int> stashed = peak_stash(schedule);
    const std::vector<StageMemory> curves = curves_of(schedule, even(schedule.shape));
    ASSERT_EQ(curves.size(), stashed.size());
    for (std::size_t stage = 0; stage < curves.size(); ++stage) {
      // While a backward runs, what it uses up is still there: a stash more than after it.
      EXPECT_EQ(most(curves[stage], MemoryUse::kSaved), kKept * stashed[stage])
          << name << " " << to_string(schedule.shape) << " stage " << stage;
    }
  });
}

TEST(CoreMemory, EverythingIsGivenBack) {
  for_each_case([](const Schedule& schedule, const std::string& name) {
    for (const StageMemory& memory : curves_of(schedule, even(schedule.shape))) {
      const MemoryPoint& last = memory.points.back();
      EXPECT_EQ(use(last, MemoryUse::kSaved), 0) << name << " " << to_string(schedule.shape);
      EXPECT_EQ(use(last, MemoryUse::kMessages), 0) << name;
      EXPECT_EQ(use(last, MemoryUse::kWorkspace), 0) << name;
      for (const MemoryPoint& point : memory.points) {
        for (const std::int64_t bytes : point.uses) EXPECT_GE(bytes, 0) << name << " " << to_string(schedule.shape);
      }
    }
  });
}

TEST(CoreMemory, PeakIsTheHighestPoint) {
  const Schedule schedule = generate("aiao", {{2, 2, 4}, 0, ""});
  MemoryModel model = even(schedule.shape);
  for (ChunkBytes& bytes : model.chunks) bytes.weights = 7;
  for (ChunkBytes& bytes : model.chunks) bytes.optimizer = 5;
  model.chunks[3].backward = kWork;
  model.host = {1, 2};
  const std::vector<StageMemory> curves = curves_of(schedule, model);
  EXPECT_EQ(curves[0].host, 1);
  EXPECT_EQ(curves[1].host, 2);
  for (const StageMemory& memory : curves) {
    std::int64_t highest = 0;
    for (const MemoryPoint& point : memory.points) highest = std::max(highest, point.device());
    EXPECT_EQ(memory.peak.device(), highest);
    EXPECT_EQ(use(memory.peak, MemoryUse::kWeights), 14);
    EXPECT_EQ(use(memory.peak, MemoryUse::kOptimizer), 10);
  }
  EXPECT_GE(use(curves[1].peak, MemoryUse::kWorkspace), kWork - kKept);
}

TEST(CoreMemory, GradientsComeWithTheFirstBackwardOrStay) {
  const Schedule schedule = generate("gpipe", {{2, 1, 4}, 0, ""});
  MemoryModel model = even(schedule.shape);
  for (ChunkBytes& bytes : model.chunks) bytes.gradients = 50;
  const StageMemory comes = curves_of(schedule, model)[0];
  EXPECT_EQ(use(comes.points.front(), MemoryUse::kGradients), 0);
  EXPECT_EQ(use(comes.points.back(), MemoryUse::kGradients), 50);
  model.gradients_stay = true;
  const StageMemory stays = curves_of(schedule, model)[0];
  EXPECT_EQ(use(stays.points.front(), MemoryUse::kGradients), 50);
  EXPECT_EQ(use(stays.points.back(), MemoryUse::kGradients), 50);
}

TEST(CoreMemory, AGradientIsAsLargeAsTheInputsThatItIsOf) {
  const Schedule schedule = generate("gpipe", {{3, 1, 1}, 0, ""});
  MemoryModel model = even(schedule.shape);
  model.chunks[2].inputs = 7 * kSent;
  const std::vector<StageMemory> curves = curves_of(schedule, model);
  // What stages receive has its place for the whole step: stage 1 has its inputs until they are used, and then, too,
  // the gradient of stage 2's.
  EXPECT_EQ(use(curves[0].points[0], MemoryUse::kInputs), kSent);
  EXPECT_EQ(use(curves[1].points[0], MemoryUse::kInputs), kSent + 7 * kSent);
  EXPECT_EQ(use(curves[2].points[0], MemoryUse::kInputs), 7 * kSent);
}

TEST(CoreMemory, TheReceiverTakesNoMoreMessagesThanItMay) {
  // All micro-batches of segment 0 are at stage 0 again long before it wants them.
  const Schedule schedule = generate("aiao", {{2, 2, 16}, 0, ""});
  MemoryModel model = even(schedule.shape);
  std::map<int, std::int64_t> waits;
  for (const int ahead : {1, 4, 16}) {
    model.receive_ahead = ahead;
    waits[ahead] = most(curves_of(schedule, model)[1], MemoryUse::kMessages);
  }
  EXPECT_GT(waits[1], waits[4]);
  EXPECT_GT(waits[4], waits[16]);
  EXPECT_LE(waits[16], 2 * kSent);
}

Schedule offloaded(const Shape& shape, bool recompute) {
  LoweringOptions options;
  const auto chunks = static_cast<std::size_t>(shape.num_chunks());
  options.offload.assign(chunks, true);
  if (recompute) options.recompute.assign(chunks, true);
  return lower(generate("aiao", {shape, 0, ""}), options);
}

TEST(CoreMemory, WhatLeavesIsInThePool) {
  std::map<int, StageMemory> by_count;
  for (const int m : {8, 16}) {
    const Schedule schedule = offloaded({2, 2, m}, false);
    by_count[m] = curves_of(schedule, even(schedule.shape))[0];  // copies are free
    EXPECT_EQ(most(by_count[m], MemoryUse::kSaved), kKept * stash_peaks(schedule)[0].device - 2 * kKept) << m;
    EXPECT_EQ(by_count[m].points.back().pool, 0);
    EXPECT_EQ(use(by_count[m].points.back(), MemoryUse::kSaved), 0);
  }
  EXPECT_EQ(most(by_count[8], MemoryUse::kSaved), most(by_count[16], MemoryUse::kSaved));
  EXPECT_GE(by_count[16].most_pool, by_count[8].most_pool + 8 * kKept);
}

TEST(CoreMemory, SlowCopiesStayLonger) {
  // A forward takes 1 ms: with 1,000 bytes a ms copies keep pace, with twice as many they do not.
  const Schedule schedule = offloaded({2, 2, 8}, false);
  const auto at_pace = most(curves_of(schedule, even(schedule.shape), 1'000)[0], MemoryUse::kSaved);
  const auto late = most(curves_of(schedule, even(schedule.shape), 2'000)[0], MemoryUse::kSaved);
  EXPECT_LT(most(curves_of(schedule, even(schedule.shape))[0], MemoryUse::kSaved), at_pace);
  EXPECT_LT(at_pace, late);
  EXPECT_LE(late, kKept * stash_peaks(schedule)[0].device);
}

TEST(CoreMemory, WhatWaitsAtBordersIsInThePool) {
  for (const int pp : {1, 2}) {
    const auto crossing = [&](int m, bool lazy) {
      const Shape shape{pp, 4, m};
      LoweringOptions options;
      options.offload.assign(static_cast<std::size_t>(shape.num_chunks()), true);
      options.lazy = lazy;
      const Schedule schedule = lower(generate("aiao", {shape, 0, ""}), options);
      StageMemory first = curves_of(schedule, even(shape))[0];
      EXPECT_EQ(first.points.back().pool, 0);
      return first;
    };
    const auto most_crossing = [](const StageMemory& memory) {
      return most(memory, MemoryUse::kInputs) + most(memory, MemoryUse::kMessages);
    };
    EXPECT_EQ(most_crossing(crossing(8, true)), most_crossing(crossing(32, true))) << pp;
    EXPECT_GE(most_crossing(crossing(32, false)), most_crossing(crossing(8, false)) + 20 * kSent) << pp;
    EXPECT_GE(crossing(32, true).most_pool, crossing(8, true).most_pool + 24 * (kKept + kSent)) << pp;
  }
}

TEST(CoreMemory, OfRecomputedChunksInputsLeave) {
  const Schedule schedule = offloaded({2, 2, 8}, true);
  MemoryModel model = even(schedule.shape);
  for (ChunkBytes& bytes : model.chunks) bytes.kept = 1;
  const StageMemory memory = curves_of(schedule, model)[1];
  EXPECT_LT(most(memory, MemoryUse::kSaved), 2 * kKept);
  EXPECT_GT(memory.most_pool, 8 * (kSent + 1) / 2);
  EXPECT_LT(memory.most_pool, 16 * (kSent + 1) + 1);
}

TEST(CoreMemory, TheUpdateComesAfterAllElse) {
  const Schedule schedule = generate("1f1b", {{2, 1, 4}, 0, ""});
  MemoryModel model = even(schedule.shape);
  const std::int64_t most = curves_of(schedule, model)[0].peak.device();
  model.update = {1000 * most, 0};
  const std::vector<StageMemory> curves = curves_of(schedule, model);
  EXPECT_GE(use(curves[0].peak, MemoryUse::kWorkspace), 1000 * most);
  EXPECT_EQ(use(curves[0].peak, MemoryUse::kSaved), 0);
  EXPECT_EQ(use(curves[0].points.back(), MemoryUse::kWorkspace), 0);
  EXPECT_LE(curves[1].peak.device(), most);
}

TEST(CoreMemory, RefusesWhatDoesNotFit) {
  const Schedule schedule = generate("1f1b", {{2, 1, 4}, 0, ""});
  MemoryModel model = even(schedule.shape);
  model.chunks.pop_back();
  EXPECT_THROW(curves_of(schedule, model), std::invalid_argument);
  model = even(schedule.shape);
  model.chunks[1].saved = -1;
  EXPECT_THROW(curves_of(schedule, model), std::invalid_argument);
  model = even(schedule.shape);
  model.update = {1};
  EXPECT_THROW(curves_of(schedule, model), std::invalid_argument);
  EXPECT_THROW(memory_curves(schedule, even(schedule.shape), {{}, {}}), std::invalid_argument);
}

}  // namespace
}  // namespace fold3d::core
