// OFFLOAD and PREFETCH: where lowering puts them, and what the validator refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "core/generators/registry.h"
#include "core/ir/stash.h"
#include "core/passes/lower.h"
#include "core/passes/validate.h"
#include "harness/complaint.h"

namespace fold3d::core {
namespace {

using test::complaint_of;
using test::contains;

Schedule aiao(int pp, int segments, int micro_batches) {
  return generate("aiao", {Shape{pp, segments, micro_batches}, 0, ""});
}

Schedule offloaded(const Schedule& compute, int distance = 1) {
  const std::vector<bool> all(static_cast<std::size_t>(compute.shape.num_chunks()), true);
  return lower(compute, LoweringOptions{.reduce = true, .offload = all, .prefetch_distance = distance});
}

int count(const Schedule& schedule, Kind kind) {
  int found = 0;
  for (const auto& actions : schedule.ranks) {
    found += static_cast<int>(std::count_if(actions.begin(), actions.end(), [&](Action a) { return a.kind == kind; }));
  }
  return found;
}

std::string complaint(const Schedule& schedule) {
  return complaint_of<std::invalid_argument>([&] { validate(schedule); });
}

TEST(Offload, EveryScheduleOfTheRegistryStaysValidAndKeepsWhatItComputes) {
  for (const SchedulerInfo& info : registry()) {
    for (const int pp : {1, 2, 3}) {
      for (const int distance : {1, 2, 5}) {
        const Schedule compute = generate(info.name, {Shape{pp, info.uses_segments ? 2 : 1, 9}, 0, ""});
        const Schedule made = offloaded(compute, distance);
        validate(made);
        EXPECT_EQ(count(made, Kind::kOffload), count(made, Kind::kPrefetch));
        Schedule without = made;
        for (auto& actions : without.ranks) {
          std::erase_if(actions, [](Action a) { return is_copy(a.kind); });
        }
        EXPECT_EQ(without, lower(compute, {.reduce = true}));
      }
    }
  }
}

TEST(Offload, AStashComesBackThatManyComputeActionsAheadAndOneUsedSoonStays) {
  int stay = 0;
  for (const int distance : {1, 2, 4}) {
    const Schedule made = offloaded(generate("fold", {Shape{2, 2, 8}, 8, "1f1b"}), distance);
    for (const auto& actions : made.ranks) {
      const auto computed = [&](std::size_t from, std::size_t to) {
        return std::count_if(actions.begin() + static_cast<std::ptrdiff_t>(from),
                             actions.begin() + static_cast<std::ptrdiff_t>(to),
                             [](Action a) { return is_compute(a.kind); });
      };
      for (const StashUse& use : stash_uses(made.shape, actions)) {
        const auto between = computed(use.forward + 1, use.first);
        EXPECT_EQ(use.offload != StashUse::kNone, between >= 3);
        stay += use.offload == StashUse::kNone;
        if (use.offload == StashUse::kNone) continue;
        EXPECT_EQ(computed(use.prefetch, use.first), std::min<std::ptrdiff_t>(distance, between - 2));
        EXPECT_EQ(computed(use.forward + 1, use.offload), 0);
      }
    }
  }
  EXPECT_GT(stay, 0);
}

TEST(Offload, DeviceRoomDoesNotGrowWithMicroBatchesAndThePoolDoes) {
  const auto peaks = [](int micro_batches) { return stash_peaks(offloaded(aiao(2, 4, micro_batches))); };
  const auto few = peaks(8);
  for (const int micro_batches : {16, 32, 64}) {
    const auto many = peaks(micro_batches);
    for (std::size_t rank = 0; rank < many.size(); ++rank) {
      EXPECT_LE(many[rank].device, few[rank].device);
      EXPECT_EQ(many[rank].pool - few[rank].pool, 4 * (micro_batches - 8));
    }
  }
  const auto without = stash_peaks(lower(aiao(2, 4, 64), {.reduce = true}));
  EXPECT_EQ(without[0].device, 4 * 64);
  EXPECT_EQ(without[0].pool, 0);
}

TEST(Offload, BytesOfTheChunksCount) {
  const Schedule made = offloaded(aiao(1, 2, 8));
  const auto ones = stash_peaks(made);
  const auto tens = stash_peaks(made, {10, 10});
  EXPECT_EQ(tens[0].device, 10 * ones[0].device);
  EXPECT_EQ(tens[0].pool, 10 * ones[0].pool);
}

TEST(Offload, OnlyTheChunksAskedForLeave) {
  const Schedule made = lower(aiao(2, 2, 8), LoweringOptions{.offload = {true, true, false, false}});
  for (const auto& actions : made.ranks) {
    for (const Action& action : actions) EXPECT_FALSE(is_copy(action.kind) && action.chunk >= 2);
  }
  EXPECT_EQ(count(made, Kind::kOffload), 16);
  EXPECT_EQ(lower(aiao(2, 2, 8), LoweringOptions{.offload = std::vector<bool>(4, false)}), lower(aiao(2, 2, 8), {}));
}

TEST(Offload, AShareOfThemLeavesSpreadEvenlyOverTheMicroBatches) {
  const auto leaving = [](double share) {
    std::vector<int> found;
    const Schedule made =
        lower(aiao(1, 4, 8), LoweringOptions{.offload = std::vector<bool>(4, true), .offload_share = share});
    for (const Action& action : made.ranks[0]) {
      if (action.kind == Kind::kOffload && action.chunk == 0) found.push_back(action.micro_batch);
    }
    return found;
  };
  EXPECT_EQ(leaving(1), (std::vector{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(leaving(0.63), (std::vector{1, 3, 4, 6, 7}));
  EXPECT_EQ(leaving(0.5), (std::vector{1, 3, 5, 7}));
  EXPECT_EQ(leaving(0.75), (std::vector{1, 2, 3, 5, 6, 7}));
  for (int percent = 1; percent <= 100; ++percent) {  // of any number in a row, as many as it can be
    const Schedule made =
        lower(aiao(2, 2, 16), LoweringOptions{.offload = std::vector<bool>(4, true), .offload_share = percent / 100.0});
    validate(made);
    EXPECT_EQ(count(made, Kind::kOffload), count(made, Kind::kPrefetch));
  }
}

TEST(Offload, OptionsThatDoNotFitAreRefused) {
  for (const double share : {0.0, -0.5, 1.01, std::nan("")}) {
    EXPECT_THROW(lower(aiao(2, 2, 4), LoweringOptions{.offload = std::vector<bool>(4, true), .offload_share = share}),
                 std::invalid_argument);
  }
  EXPECT_THROW(lower(aiao(2, 2, 4), LoweringOptions{.offload = {true}}), std::invalid_argument);
  EXPECT_THROW(offloaded(aiao(2, 2, 4), 0), std::invalid_argument);
}

TEST(Offload, EveryLostOrMisplacedCopyIsFound) {
  const Schedule whole = offloaded(aiao(2, 2, 6));
  for (std::size_t rank = 0; rank < whole.ranks.size(); ++rank) {
    for (std::size_t step = 0; step < whole.ranks[rank].size(); ++step) {
      const Action action = whole.ranks[rank][step];
      if (!is_copy(action.kind)) continue;
      Schedule dropped = whole;
      dropped.ranks[rank].erase(dropped.ranks[rank].begin() + static_cast<std::ptrdiff_t>(step));
      EXPECT_TRUE(contains(complaint(dropped), "is missing")) << to_string(action);
      Schedule last = dropped;
      last.ranks[rank].push_back(action);
      EXPECT_TRUE(contains(complaint(last), "comes before " + to_string(action))) << complaint(last);
      Schedule first = dropped;
      first.ranks[rank].insert(first.ranks[rank].begin(), action);
      EXPECT_TRUE(contains(complaint(first), to_string(action) + " on rank " + std::to_string(rank) + " comes before"))
          << complaint(first);
    }
  }
}

TEST(Offload, RoomThatIsTooSmallIsRefusedAndNamesTheRank) {
  const Schedule made = offloaded(aiao(2, 2, 8));
  const auto peaks = stash_peaks(made);
  const std::int64_t device = std::max(peaks[0].device, peaks[1].device);
  EXPECT_NO_THROW(validate_room(made, {device, peaks[0].pool, {}}));
  EXPECT_THROW(validate_room(made, {device - 1, std::nullopt, {}}), std::invalid_argument);
  EXPECT_THROW(validate_room(made, {std::nullopt, peaks[0].pool - 1, {}}), std::invalid_argument);
}

}  // namespace
}  // namespace fold3d::core
