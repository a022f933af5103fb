// Every registered schedule at many sizes: lowering, validator, lengths, stash.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <tuple>

#include "core/generators/fold.h"
#include "core/generators/registry.h"
#include "core/ir/deps.h"
#include "core/ir/stash.h"
#include "core/ir/timeline.h"
#include "core/passes/lower.h"
#include "core/passes/validate.h"

namespace fold3d::core {
namespace {

// Core has no threads: sanitizers need every path once, not every size.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kMaxMicroBatches = 5;
#else
constexpr int kMaxMicroBatches = 20;
#endif

/// Calls check(schedule, what) for every schedule of the registry, and all N and turns of the family, at many sizes.
template <class Check>
void for_each_schedule(int max_pp, int max_segments, int max_micro_batches, Check check) {
  for (int pp = 1; pp <= max_pp; ++pp) {
    for (int segments = 1; segments <= max_segments; ++segments) {
      for (int m = 1; m <= max_micro_batches; ++m) {
        const Shape shape{pp, segments, m};
        for (const SchedulerInfo& info : registry()) {
          if (info.allows(segments)) check(generate(info.name, {shape, 0, ""}), info.name);
        }
        for (const int n : {1, 2, pp - 1, pp, m - 1, m}) {
          if (n < 1) continue;
          check(fold_order(shape, n, Turn::kAll), "all, N=" + std::to_string(n));
          check(fold_order(shape, n, Turn::kOneFOneB), "1f1b, N=" + std::to_string(n));
        }
      }
    }
  }
}

TEST(CoreSchedules, LoweredWithoutDeadlockAtEverySize) {
  for_each_schedule(8, 4, kMaxMicroBatches, [](const Schedule& schedule, const std::string& what) {
    try {
      validate(lower(schedule, {.reduce = true}));
    } catch (const std::exception& error) {
      ADD_FAILURE() << what << ": " << error.what();
    }
  });
}

TEST(CoreSchedules, ReceivesComeInTheOrderOfTheSends) {
  for_each_schedule(4, 3, 7, [](const Schedule& schedule, const std::string& what) {
    const Schedule lowered = lower(schedule, {});
    // By sending rank, receiving rank and direction; of what is sent the RECVs to come.
    std::map<std::tuple<int, int, Kind>, std::vector<Action>> sent, received;
    for (const auto& actions : lowered.ranks) {
      for (const Action& a : actions) {
        if (!is_send(a.kind) && !is_recv(a.kind)) continue;
        const int here = lowered.shape.stage_of(a.chunk), there = lowered.shape.stage_of(other_end(a).chunk);
        if (is_send(a.kind)) sent[{here, there, other_end(a).kind}].push_back(other_end(a));
        if (is_recv(a.kind)) received[{there, here, a.kind}].push_back(a);
      }
    }
    EXPECT_EQ(sent, received) << what << " " << to_string(schedule.shape);
  });
}

TEST(CoreSchedules, LengthsOfThePapers) {
  for (int pp = 1; pp <= 8; ++pp) {
    for (int segments = 1; segments <= 4; ++segments) {
      for (int m = 1; m <= kMaxMicroBatches; ++m) {
        const Shape shape{pp, segments, m};
        const double round = 3;  // F + B
        const auto length = [&](const char* name) { return unit_timeline(generate(name, {shape, 0, ""})).makespan; };
        if (segments == 1) {
          EXPECT_EQ(length("gpipe"), (m + pp - 1) * round);
          EXPECT_EQ(length("1f1b"), (m + pp - 1) * round);
        }
        if (m >= pp && segments == 1) {
          EXPECT_EQ(length("zb_h1"), m * round + (pp - 1));  // F + I - W = 1 for each stage but one
        }
        if (m >= 2 * pp - 1 && segments == 2) {
          EXPECT_EQ(length("zb_v"), 2 * m * round + (pp - 1));  // no bubble
        }
        if (m >= pp) {
          EXPECT_EQ(length("interleaved"), (segments * m + pp - 1) * round);
        }
        EXPECT_EQ(length("aiao"), ((segments - 1) * std::max(m, pp) + m + pp - 1) * round);
      }
    }
  }
}

TEST(CoreSchedules, StashOfThePapers) {
  const auto stash = [](const char* name, Shape shape) { return peak_stash(generate(name, {shape, 0, ""})); };
  EXPECT_EQ(stash("gpipe", {3, 1, 5}), (std::vector<int>{5, 5, 5}));
  EXPECT_EQ(stash("1f1b", {3, 1, 5}), (std::vector<int>{3, 2, 1}));
  EXPECT_EQ(stash("zb_h1", {3, 1, 5}), (std::vector<int>{3, 3, 3}));
  EXPECT_EQ(stash("kfkb", {3, 1, 5}), (std::vector<int>{5, 4, 2}));
  EXPECT_EQ(stash("shifted_critical_path", {4, 1, 5}), (std::vector<int>{4, 3, 3, 1}));
  EXPECT_EQ(stash("zb_v", {3, 2, 5}), (std::vector<int>{6, 6, 6}));
  EXPECT_EQ(stash("interleaved", {4, 2, 16}).front(), 4 * (2 + 1) - 1);
  EXPECT_EQ(stash("aiao", {2, 3, 5}), (std::vector<int>{15, 15}));
}

TEST(CoreSchedules, TransfersDelayTheNextStageOnly) {
  const Schedule schedule = generate("1f1b", {Shape{2, 1, 1}, 0, ""});
  EXPECT_EQ(unit_timeline(schedule, {1, 2, 0.5}).makespan, 2 * (1 + 2 + 0.5));
  const Schedule alone = generate("aiao", {Shape{1, 3, 2}, 0, ""});
  EXPECT_EQ(unit_timeline(alone, {1, 2, 0.5}).makespan, 3 * 2 * (1 + 2));
}

TEST(Registry, RejectsWhatHasNoEffect) {
  EXPECT_THROW(generate("nothing", {}), std::invalid_argument);
  EXPECT_THROW(generate("1f1b", {Shape{2, 2, 4}, 0, ""}), std::invalid_argument);
  EXPECT_THROW(generate("aiao", {Shape{2, 2, 4}, 2, ""}), std::invalid_argument);
  EXPECT_THROW(generate("zb_v", {Shape{2, 1, 4}, 0, ""}), std::invalid_argument);
  EXPECT_THROW(generate("fold", {Shape{2, 2, 4}, -1, ""}), std::invalid_argument);
  EXPECT_THROW(generate("fold", {Shape{2, 2, 4}, 2, "half"}), std::invalid_argument);
  EXPECT_THROW(generate("gpipe", {Shape{0, 1, 4}, 0, ""}), std::invalid_argument);
}

}  // namespace
}  // namespace fold3d::core
