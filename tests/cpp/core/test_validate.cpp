// The validator refuses every broken schedule and says where.
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include "core/generators/registry.h"
#include "core/ir/deps.h"
#include "core/passes/lower.h"
#include "core/passes/validate.h"
#include "harness/complaint.h"

namespace fold3d::core {
namespace {

using test::complaint_of;
using test::contains;

std::string complaint(const Schedule& schedule) {
  return complaint_of<std::invalid_argument>([&] { validate(schedule); });
}

std::vector<Schedule> samples() {
  std::vector<Schedule> schedules;
  for (const SchedulerInfo& info : registry()) {
    const Schedule compute = generate(info.name, {Shape{3, info.uses_segments ? 2 : 1, 4}, 0, ""});
    schedules.push_back(compute);
    schedules.push_back(lower(compute, {.reduce = true}));
  }
  return schedules;
}

TEST(Validate, EveryDropAndDuplicateIsFound) {
  for (const Schedule& whole : samples()) {
    for (std::size_t rank = 0; rank < whole.ranks.size(); ++rank) {
      for (std::size_t step = 0; step < whole.ranks[rank].size(); ++step) {
        const auto at = static_cast<std::ptrdiff_t>(step);
        Schedule dropped = whole;
        dropped.ranks[rank].erase(dropped.ranks[rank].begin() + at);
        EXPECT_TRUE(contains(complaint(dropped), "is missing"));
        Schedule doubled = whole;
        doubled.ranks[rank].insert(doubled.ranks[rank].begin() + at, whole.ranks[rank][step]);
        EXPECT_TRUE(contains(complaint(doubled), "occurs twice"));
      }
    }
  }
}

TEST(Validate, EverySwapOfAnActionWithWhatItWaitsForIsFound) {
  for (const Schedule& whole : samples()) {
    const bool with_comm = has_comm(whole);
    for (std::size_t rank = 0; rank < whole.ranks.size(); ++rank) {
      const auto& actions = whole.ranks[rank];
      for (std::size_t later = 0; later < actions.size(); ++later) {
        for (const Action& needed : waits_for(whole.shape, actions[later], with_comm)) {
          const auto earlier = std::find(actions.begin(), actions.end(), needed);
          if (earlier == actions.end()) continue;
          Schedule swapped = whole;
          std::swap(swapped.ranks[rank][static_cast<std::size_t>(earlier - actions.begin())],
                    swapped.ranks[rank][later]);
          EXPECT_FALSE(complaint(swapped).empty()) << to_string(actions[later]) << " and " << to_string(needed);
        }
      }
    }
  }
}

TEST(Validate, MarksTheCell) {
  const std::string text = complaint(parse_csv("0F0,0F1,0B0,0B1\n1F0,1B1,1F1,1B0\n"));
  EXPECT_TRUE(contains(text, "1B1 on rank 1 comes before 1F1 (step 2), which it waits for")) << text;
  EXPECT_TRUE(contains(text, "1      0F1    >1B1<   <-- here, rank 1\n")) << text;
}

TEST(Validate, ShowsTheCycleOfADeadlock) {
  const std::string text =
      complaint(parse_csv("0F0,0F1,0SEND_F0,0RECV_B0,0B0,0SEND_F1,0RECV_B1,0B1\n"
                          "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"));
  EXPECT_TRUE(contains(text,
                       "deadlock: 0RECV_B0 on rank 0 waits for 1SEND_B0 on rank 1; 1RECV_F1 on rank 1 waits for "
                       "0SEND_F1 on rank 0"))
      << text;
}

TEST(Validate, ForwardOnly) {
  const Schedule evaluation = parse_csv("0F0,2F0\n1F0,3F0\n");
  EXPECT_NO_THROW(validate(evaluation, /*forward_only=*/true));
  EXPECT_NO_THROW(validate(lower(evaluation, {}), /*forward_only=*/true));
  EXPECT_TRUE(contains(complaint(evaluation), "0B0 on rank 0 is missing"));
  EXPECT_THROW(lower(evaluation, {.reduce = true}), std::invalid_argument);
}

TEST(Validate, SplitBackward) {
  const Schedule split = parse_csv("0F0,0I0,0W0\n1F0,1I0,1W0\n");
  EXPECT_NO_THROW(validate(split));
  const Schedule lowered = lower(split, {.reduce = true});
  EXPECT_NO_THROW(validate(lowered));
  EXPECT_EQ(lowered.ranks[1], parse_csv("0F0\n1RECV_F0,1F0,1I0,1SEND_B0,1W0,1REDUCE_GRAD\n").ranks[1]);
}

}  // namespace
}  // namespace fold3d::core
