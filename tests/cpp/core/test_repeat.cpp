// Steps without a flush: what their lists are, and what the validator says of worse ones.
#include "core/passes/repeat.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include "core/generators/registry.h"
#include "core/ir/versions.h"
#include "core/passes/lower.h"
#include "core/passes/validate.h"
#include "harness/complaint.h"

namespace fold3d::core {
namespace {

using test::complaint_of;
using test::contains;

int count(const std::vector<Action>& actions, Kind kind) {
  return static_cast<int>(
      std::count_if(actions.begin(), actions.end(), [kind](const Action& action) { return action.kind == kind; }));
}

TEST(Repeat, EachStageLeavesTheBackwardsOfTheForwardsThatItIsAhead) {
  for (const int pp : {1, 2, 4, 8}) {
    for (const int m : {pp, pp + 1, 3 * pp + 1}) {
      const Repeating lists = without_flush("1f1b", {pp, 1, m});
      for (int stage = 0; stage < pp; ++stage) {
        const auto s = static_cast<std::size_t>(stage);
        EXPECT_EQ(count(lists.every.ranks[s], Kind::kForward), m);
        EXPECT_EQ(count(lists.every.ranks[s], Kind::kBackward), m);
        EXPECT_EQ(count(lists.every.ranks[s], Kind::kReduce), 1);
        EXPECT_EQ(lists.every.ranks[s].back().micro_batch, m - 1);
        EXPECT_EQ(count(lists.drain.ranks[s], Kind::kBackward), pp - stage);
        EXPECT_EQ(count(lists.drain.ranks[s], Kind::kReduce), 1);
        EXPECT_EQ(lists.drain.ranks[s].back().kind, Kind::kReduce);
        EXPECT_EQ(count(lists.first.ranks[s], Kind::kBackward), m - pp + stage);
        EXPECT_EQ(count(lists.first.ranks[s], Kind::kReduce), 0);
      }
    }
  }
}

TEST(Repeat, FewerMicroBatchesThanStagesAndOtherSchedulesAreRefused) {
  const auto complaint = [](const char* name, Shape shape) {
    return complaint_of<std::invalid_argument>([&] { without_flush(name, shape); });
  };
  EXPECT_TRUE(contains(complaint("1f1b", {4, 1, 3}), "at least as many micro-batches as stages"));
  EXPECT_TRUE(contains(complaint("gpipe", {4, 1, 4}), "'gpipe' cannot be had without a flush"));
}

/// 1F1B of several steps at once, as it is cut.
Schedule steps(int pp, int micro_batches) {
  return lower(generate("1f1b", {Shape{pp, 1, 5 * micro_batches}, 0, ""}), {});
}

TEST(Repeat, AStepWaitsForTheNormOfTheStepBeforeTheOneBefore) {
  EXPECT_NO_THROW(validate_steps(steps(4, 4), 4));
  // Few micro-batches: a step's first forward stands before the last backward that it waits for.
  const std::string complaint = complaint_of<std::invalid_argument>([] { validate_steps(steps(4, 2), 2); });
  EXPECT_TRUE(contains(complaint, "0F4 on rank 0 comes before 0B1")) << complaint;
}

TEST(Repeat, ListsWithAFlushHaveNothingOfTheStepBefore) {
  for (const SchedulerInfo& info : registry()) {
    const Schedule made =
        lower(generate(info.name, {Shape{3, info.uses_segments ? 2 : 1, 6}, 0, ""}), {.reduce = true});
    for (const auto& actions : made.ranks) {
      const std::vector<bool> before = of_step_before(made.shape, actions);
      EXPECT_EQ(std::count(before.begin(), before.end(), true), 0) << info.name;
    }
  }
}

TEST(Repeat, OneByOneEachStageIsAsManyBehindAsStagesComeAfterIt) {
  for (const int pp : {1, 2, 4, 7}) {
    for (const int steps : {1, pp, 3 * pp + 1}) {
      const std::vector<Schedule> lists = by_micro_batch(pp, steps);
      ASSERT_EQ(lists.size(), static_cast<std::size_t>(steps + pp - 1));
      for (int step = 0; step < steps + pp - 1; ++step) {
        for (int stage = 0; stage < pp; ++stage) {
          const auto& actions = lists[static_cast<std::size_t>(step)].ranks[static_cast<std::size_t>(stage)];
          const int behind = step - (pp - 1 - stage);
          const int backwards = behind >= 0 && behind < steps ? 1 : 0;
          EXPECT_EQ(count(actions, Kind::kForward), step < steps ? 1 : 0);
          EXPECT_EQ(count(actions, Kind::kBackward), backwards);
          EXPECT_EQ(count(actions, Kind::kReduce), backwards);
        }
      }
    }
  }
  EXPECT_THROW(by_micro_batch(0, 1), std::invalid_argument);
  EXPECT_THROW(by_micro_batch(2, 0), std::invalid_argument);
}

TEST(Repeat, VersionsAreThoseOfTheDissertation) {
  const Shape shape{4, 1, 4};
  for (int stage = 0; stage < 4; ++stage) {
    EXPECT_EQ(version_of(VersionRule::kStashing, shape, stage, 4), stage + 1);  // figure 2.8, input 5
    EXPECT_EQ(version_of(VersionRule::kVerticalSync, shape, stage, 4), 1);
    EXPECT_EQ(live_versions(VersionRule::kStashing, shape, stage), 4 - stage);
    EXPECT_EQ(live_versions(VersionRule::kVerticalSync, shape, stage), 4);
    EXPECT_EQ(live_versions(VersionRule::kTwo, shape, stage), 2);
    for (int k = 0; k < 20; ++k) {
      EXPECT_EQ(version_of(VersionRule::kTwo, shape, stage, k), std::max(k / 4 - 1, 0));
    }
  }
  EXPECT_EQ(parse_version_rule("vertical_sync"), VersionRule::kVerticalSync);
  EXPECT_THROW(parse_version_rule("naive"), std::invalid_argument);
}

}  // namespace
}  // namespace fold3d::core
