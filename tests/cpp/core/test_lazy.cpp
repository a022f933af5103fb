// What crosses chunk borders and waits in the pool: where lowering puts its copies, what the validator refuses, what
// the simulator makes of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include "core/generators/registry.h"
#include "core/ir/action_kinds.h"
#include "core/ir/deps.h"
#include "core/ir/stash.h"
#include "core/passes/lower.h"
#include "core/passes/validate.h"
#include "core/sim/simulate.h"

namespace fold3d::core {
namespace {

std::vector<bool> all_of(const Schedule& compute) {
  return std::vector<bool>(static_cast<std::size_t>(compute.shape.num_chunks()), true);
}

Schedule aiao(int pp, int segments, int micro_batches) {
  return generate("aiao", {Shape{pp, segments, micro_batches}, 0, ""});
}

Schedule lazy(const Schedule& compute, int distance = 1) {
  return lower(compute, {.reduce = true, .offload = all_of(compute), .lazy = true, .prefetch_distance = distance});
}

bool crosses(const Action& action) { return is_copy(action.kind) && about(action.kind).neighbour != 0; }

std::string complaint(const Schedule& schedule) {
  try {
    validate(schedule);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(Lazy, EveryScheduleOfTheRegistryStaysValidAndOnlyCopiesAreNew) {
  int crossings = 0;
  for (const SchedulerInfo& info : registry()) {
    for (const int pp : {1, 2, 3}) {
      for (const int distance : {1, 2, 5}) {
        const int segments = info.allows(3) ? 3 : info.allows(2) ? 2 : 1;
        const Schedule compute = generate(info.name, {Shape{pp, segments, 9}, 0, ""});
        const Schedule made = lazy(compute, distance);
        validate(made);
        EXPECT_EQ(parse_csv(to_csv(made)), made);
        Schedule without = made;
        for (auto& actions : without.ranks) {
          crossings += static_cast<int>(std::count_if(actions.begin(), actions.end(), crosses));
          std::erase_if(actions, crosses);
        }
        EXPECT_EQ(without, lower(compute, {.reduce = true, .offload = all_of(compute), .prefetch_distance = distance}));
      }
    }
  }
  EXPECT_GT(crossings, 0);
}

TEST(Lazy, WhatWaitsComesThatManyComputeActionsAheadAndWhatIsUsedSoonStays) {
  int stay = 0, move = 0;
  for (const int pp : {1, 2}) {
    for (const int distance : {1, 2, 4}) {
      const Schedule made = lazy(aiao(pp, 2, 6), distance);
      for (const auto& actions : made.ranks) {
        const auto computed = [&](std::size_t from, std::size_t to) {
          return std::count_if(actions.begin() + static_cast<std::ptrdiff_t>(from),
                               actions.begin() + static_cast<std::ptrdiff_t>(to),
                               [](Action a) { return is_compute(a.kind); });
        };
        for (const BorderUse& use : border_uses(made.shape, actions)) {
          const bool moves = use.prefetch != StashUse::kNone;
          EXPECT_EQ(moves, computed(use.there + 1, use.use) >= 3);
          EXPECT_EQ(use.offload != StashUse::kNone, moves && !use.is_message);
          EXPECT_EQ(use.is_message, pp > 1);
          (moves ? move : stay) += 1;
          if (moves) {
            EXPECT_EQ(computed(use.prefetch, use.use),
                      std::min<std::ptrdiff_t>(distance, computed(use.there + 1, use.use) - 2));
          }
          if (use.offload != StashUse::kNone) {
            EXPECT_EQ(computed(use.there + 1, use.offload), 0);
          }
        }
      }
    }
  }
  EXPECT_GT(stay, 0);
  EXPECT_GT(move, 0);
}

/// Peaks of rank 0 with stashes of ten bytes, and one byte that crosses each border.
std::vector<StashPeak> peaks_of(const Schedule& schedule) {
  const auto chunks = static_cast<std::size_t>(schedule.shape.num_chunks());
  return stash_peaks(schedule, std::vector<std::int64_t>(chunks, 10), std::vector<std::int64_t>(chunks, 1));
}

TEST(Lazy, DeviceBytesDoNotGrowWithMicroBatchesWithWhatCrossesBorders) {
  for (const int pp : {1, 2}) {
    const auto few = peaks_of(lazy(aiao(pp, 4, 8)));
    const auto stashes_only_few =
        peaks_of(lower(aiao(pp, 4, 8), {.offload = all_of(aiao(pp, 4, 8)), .prefetch_distance = 1}));
    for (const int m : {16, 32, 64}) {
      const auto many = peaks_of(lazy(aiao(pp, 4, m)));
      for (std::size_t rank = 0; rank < many.size(); ++rank) {
        EXPECT_LE(many[rank].device, few[rank].device) << pp << " " << m;
        EXPECT_GE(many[rank].pool - few[rank].pool, 4 * 10 * (m - 8));
      }
      // Without, each micro-batch more waits on the device of the first stage.
      const auto stashes_only =
          peaks_of(lower(aiao(pp, 4, m), {.offload = all_of(aiao(pp, 4, m)), .prefetch_distance = 1}));
      EXPECT_GE(stashes_only[0].device - stashes_only_few[0].device, m - 8 - 4);
    }
  }
}

TEST(Lazy, EveryLostOrMisplacedCopyIsFound) {
  for (const int pp : {1, 2}) {
    const Schedule whole = lazy(aiao(pp, 2, 8));
    int tried = 0;
    for (std::size_t rank = 0; rank < whole.ranks.size(); ++rank) {
      for (std::size_t step = 0; step < whole.ranks[rank].size(); ++step) {
        const Action action = whole.ranks[rank][step];
        if (!crosses(action)) continue;
        ++tried;
        Schedule dropped = whole;
        dropped.ranks[rank].erase(dropped.ranks[rank].begin() + static_cast<std::ptrdiff_t>(step));
        // A message whose PREFETCH is gone arrives on the device, as in other schedules.
        EXPECT_EQ(complaint(dropped).empty(), pp > 1) << to_string(action);
        Schedule last = dropped;
        last.ranks[rank].push_back(action);
        EXPECT_TRUE(contains(complaint(last), "comes before " + to_string(action))) << complaint(last);
        Schedule first = dropped;
        first.ranks[rank].insert(first.ranks[rank].begin(), action);
        const std::string text = to_string(action) + " on rank " + std::to_string(rank) + " comes before";
        EXPECT_TRUE(contains(complaint(first), text)) << complaint(first);
      }
    }
    EXPECT_GT(tried, 0);
  }
}

TEST(Lazy, CopiesOfWhatIsNotThereAreRefused) {
  const auto with = [](Schedule schedule, const std::vector<std::string>& texts) {
    for (const std::string& text : texts) schedule.ranks[0].push_back(parse_action(text));
    return complaint(schedule);
  };
  const Schedule two = lower(aiao(2, 2, 4), {});
  const std::string brought = with(two, {"2PREFETCH_F1", "2OFFLOAD_F1"});
  EXPECT_TRUE(contains(brought, "2OFFLOAD_F1 on rank 0 has nothing to take away: a message brings it")) << brought;
  EXPECT_TRUE(contains(with(two, {"0PREFETCH_F1"}), "has nothing to move"));
  const Schedule one = lower(aiao(1, 2, 4), {});
  EXPECT_TRUE(contains(with(one, {"1PREFETCH_B0"}), "has nothing to move"));
  EXPECT_TRUE(contains(with(one, {"1OFFLOAD_F0"}), "1PREFETCH_F0 on rank 0 is missing")) << with(one, {"1OFFLOAD_F0"});
  EXPECT_THROW(waits_for(one.shape, parse_action("1PREFETCH_B0"), true), std::invalid_argument);
}

TEST(Lazy, RoomCountsWhatCrossesBorders) {
  const Schedule made = lazy(aiao(1, 2, 8));
  const Room exact{peaks_of(made)[0].device, peaks_of(made)[0].pool, {10, 10}, {1, 1}};
  EXPECT_NO_THROW(validate_room(made, exact));
  Room less = exact;
  *less.pool -= 1;
  EXPECT_THROW(validate_room(made, less), std::invalid_argument);
  less = exact;
  less.sent_bytes.clear();
  EXPECT_NO_THROW(validate_room(made, less));
}

constexpr std::int64_t kForward = 1'000'000;

/// A byte of a copy takes a nanosecond.
ClusterModel model_of(const Schedule& schedule, std::int64_t sent_bytes) {
  const auto chunks = static_cast<std::size_t>(schedule.shape.num_chunks());
  ClusterModel model;
  model.forward_ns.assign(chunks, kForward);
  model.backward_ns.assign(chunks, 2 * kForward);
  model.layers.assign(chunks, 1);
  model.activation_bytes.assign(chunks, sent_bytes);
  model.gradient_bytes.assign(chunks, 0);
  model.stash_bytes.assign(chunks, 0);
  model.copy_bandwidth = 1e9;
  model.bandwidth = 1e15;
  return model;
}

TEST(Lazy, SimulatedCopiesThatFitCostNothingAndOthersAreWaitedFor) {
  for (const int pp : {1, 2}) {
    const Schedule made = lazy(aiao(pp, 2, 8));
    ClusterModel fits = model_of(made, kForward / 2);
    const TrainingStep quick = simulate_step(made, fits);
    EXPECT_EQ(quick.ranks[0].exposed_offload_ns, 0);
    fits.stash_bytes.clear();  // copies are free
    EXPECT_EQ(quick.step_ns, simulate_step(made, fits).step_ns);

    const TrainingStep slow = simulate_step(made, model_of(made, 3 * kForward), {.spans = true});
    EXPECT_GT(slow.ranks[0].exposed_offload_ns, 0);
    int checked = 0;
    for (const SimulatedSpan& copy : slow.spans) {
      if (copy.lane != SimulatedSpan::Lane::kPrefetch || copy.bytes == 0) continue;
      const Kind user = copy.action.kind == Kind::kPrefetchForward ? Kind::kForward : Kind::kBackward;
      for (const SimulatedSpan& computed : slow.spans) {
        if (computed.lane != SimulatedSpan::Lane::kCompute || computed.rank != copy.rank) continue;
        if (computed.action != Action{copy.action.chunk, user, copy.action.micro_batch}) continue;
        EXPECT_GE(computed.start_ns, copy.end_ns);
        ++checked;
      }
    }
    EXPECT_GT(checked, 8);
  }
}

TEST(Lazy, SimulatedMessagesThatComeLateAreCopiedWhenTheyAreThere) {
  const Schedule made = lazy(aiao(2, 2, 8));
  ClusterModel model = model_of(made, kForward);
  model.latency_ns = 20 * kForward;  // no message is there when its PREFETCH stands in the list
  const TrainingStep step = simulate_step(made, model, {.spans = true});
  int copies = 0;
  for (const SimulatedSpan& span : step.spans) copies += span.lane == SimulatedSpan::Lane::kPrefetch && span.bytes > 0;
  EXPECT_GT(copies, 0);
  EXPECT_GE(step.step_ns, 40 * kForward);
}

}  // namespace
}  // namespace fold3d::core
