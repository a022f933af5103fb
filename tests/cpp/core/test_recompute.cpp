// RECOMPUTE: where lowering puts it, what waits for it, what it costs.
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include "core/generators/registry.h"
#include "core/ir/deps.h"
#include "core/ir/stash.h"
#include "core/ir/timeline.h"
#include "core/passes/lower.h"
#include "core/passes/validate.h"
#include "core/sim/simulate.h"
#include "harness/complaint.h"

namespace fold3d::core {
namespace {

using test::complaint_of;

std::vector<bool> all_chunks(const Shape& shape) {
  return std::vector<bool>(static_cast<std::size_t>(shape.num_chunks()), true);
}

Schedule recomputed(const Schedule& compute, std::vector<bool> chunks) {
  return lower(compute, {.reduce = true, .recompute = std::move(chunks)});
}

std::string complaint(const Schedule& schedule, bool forward_only = false) {
  return complaint_of<std::invalid_argument>([&] { validate(schedule, forward_only); });
}

template <class Check>
void for_each_schedule(Check check) {
  for (const SchedulerInfo& info : registry()) {
    for (const int pp : {1, 2, 3}) {
      for (const int m : {1, 2, 5}) {
        check(generate(info.name, {Shape{pp, info.uses_segments ? 2 : 1, m}, 0, ""}));
      }
    }
  }
}

TEST(Recompute, StandsBeforeTheBackwardAndNotAtTheTurn) {
  const Schedule lowered = recomputed(parse_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"), {true, true});
  EXPECT_EQ(to_csv(lowered),
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0RECOMPUTE0,0B0,0RECV_B1,0RECOMPUTE1,0B1,0REDUCE_GRAD\n"
            "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD\n");
}

TEST(Recompute, OnlyOfTheChunksThatAreAsked) {
  const Schedule compute = generate("aiao", {Shape{2, 2, 2}, 0, ""});
  const Schedule lowered = recomputed(compute, {true, false, false, true});
  for (const auto& actions : lowered.ranks) {
    for (const Action& action : actions) {
      const bool asked = action.chunk == 0 || action.chunk == 3;
      EXPECT_TRUE(action.kind != Kind::kRecompute || asked) << to_string(action);
    }
  }
}

TEST(Recompute, EveryScheduleIsValidAndOtherwiseTheSame) {
  for_each_schedule([](const Schedule& compute) {
    const Schedule without = lower(compute, {.reduce = true});
    EXPECT_EQ(recomputed(compute, {}), without);
    Schedule with = recomputed(compute, all_chunks(compute.shape));
    EXPECT_EQ(complaint(with), "");
    EXPECT_EQ(parse_csv(to_csv(with)), with);
    EXPECT_EQ(peak_stash(with), peak_stash(without));
    for (auto& actions : with.ranks) {
      for (std::size_t step = 0; step < actions.size(); ++step) {
        if (actions[step].kind != Kind::kRecompute) continue;
        const OptionalActions present(compute);
        EXPECT_EQ(actions[step + 1], present.input_gradient(actions[step].chunk, actions[step].micro_batch));
      }
      std::erase_if(actions, [](const Action& action) { return action.kind == Kind::kRecompute; });
    }
    EXPECT_EQ(with, without);
  });
}

TEST(Recompute, EveryForwardButThoseAtTheTurnRunsAgain) {
  for_each_schedule([](const Schedule& compute) {
    int turns = 0;
    for (const auto& actions : compute.ranks) {
      for (std::size_t step = 0; step + 1 < actions.size(); ++step) {
        const auto& [chunk, kind, i] = actions[step];
        turns += kind == Kind::kForward && actions[step + 1].kind != Kind::kForward &&
                 actions[step + 1].chunk == chunk && actions[step + 1].micro_batch == i;
      }
    }
    int again = 0;
    for (const auto& actions : recomputed(compute, all_chunks(compute.shape)).ranks) {
      again += static_cast<int>(std::count_if(actions.begin(), actions.end(),
                                              [](const Action& action) { return action.kind == Kind::kRecompute; }));
    }
    EXPECT_EQ(again + turns, compute.shape.num_chunks() * compute.shape.micro_batches);
  });
}

TEST(Recompute, BackwardsWaitForIt) {
  const Shape shape{2, 1, 1};
  const Schedule schedule = parse_csv("0F0,0RECOMPUTE0,0B0\n1F0,1RECOMPUTE0,1I0,1W0\n");
  const OptionalActions present(schedule);
  const auto waits = [&](const char* text) {
    std::string joined;
    for (const Action& action : waits_for(shape, parse_action(text), /*with_comm=*/true, present)) {
      joined += (joined.empty() ? "" : " ") + to_string(action);
    }
    return joined;
  };
  EXPECT_EQ(waits("0RECOMPUTE0"), "0F0");
  EXPECT_EQ(waits("0B0"), "0F0 0RECOMPUTE0 0RECV_B0");
  EXPECT_EQ(waits("1I0"), "1F0 1RECOMPUTE0");
  EXPECT_EQ(waits("1W0"), "1I0");
}

TEST(Recompute, TheValidatorFindsWhatIsWrong) {
  EXPECT_EQ(complaint(parse_csv("0F0,0RECOMPUTE0,0B0\n")), "");
  const auto finds = [](const char* csv, const char* part, bool forward_only = false) {
    const std::string text = complaint(parse_csv(csv), forward_only);
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  finds("0RECOMPUTE0,0F0,0B0\n", "0RECOMPUTE0 on rank 0 comes before 0F0");
  finds("0F0,0B0,0RECOMPUTE0\n", "0B0 on rank 0 comes before 0RECOMPUTE0");
  finds("0F0,0RECOMPUTE0,0RECOMPUTE0,0B0\n", "occurs twice");
  finds("0F0,0RECOMPUTE0\n", "0B0 on rank 0 is missing");
  finds("0F0,0RECOMPUTE0\n", "does not belong into a forward-only schedule", /*forward_only=*/true);
}

TEST(Recompute, LoweringRefusesWhatItWouldPassOver) {
  const Schedule compute = parse_csv("0F0,0F1,0B0,0B1\n");
  EXPECT_THROW(recomputed(compute, {true, false}), std::invalid_argument);
  EXPECT_THROW(lower(recomputed(compute, {true}), {}), std::invalid_argument);
}

TEST(Recompute, RunsWhileTheGradientIsOnItsWay) {
  // Rank 0 is idle from 2 to 4 and from 6 to 7 otherwise.
  const Schedule compute = parse_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
  EXPECT_EQ(unit_timeline(compute).makespan, 9);
  EXPECT_EQ(unit_timeline(recomputed(compute, {true, true})).makespan, 9);

  ClusterModel model;
  model.forward_ns = {1000, 1000};
  model.backward_ns = {2000, 2000};
  model.activation_bytes = {0, 0};
  model.layers = {1, 1};
  model.gradient_bytes = {0, 0};
  const TrainingStep without = simulate_step(compute, model);
  const TrainingStep with = simulate_step(recomputed(compute, {true, true}), model);
  EXPECT_EQ(with.ranks[0].compute_ns, without.ranks[0].compute_ns + 2 * 1000);
  EXPECT_EQ(with.ranks[1].compute_ns, without.ranks[1].compute_ns);
}

}  // namespace
}  // namespace fold3d::core
