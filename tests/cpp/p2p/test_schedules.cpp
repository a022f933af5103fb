// Whole lowered schedules over the loopback transport, ranks = threads, with random delays in transport and
// compute: every message has the right content, id and order, and nothing hangs.
// FOLD3D_STRESS_RUNS sets the number of random runs.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/ir/schedule.h"
#include "core/passes/lower.h"
#include "harness/comm_harness.h"
#include "harness/stress.h"

namespace fold3d::test {
namespace {

using namespace std::chrono_literals;

void expect_clean(const RunSetup& run, const std::string& what) {
  for (const std::string& error : run_ranks(run)) EXPECT_EQ(error, "") << what;
}

TEST(Schedules, RandomRunsWithRandomDelays) {
  const int runs = stress_runs(300, 60);
  for (int index = 0; index < runs; ++index) {
    std::mt19937_64 random(static_cast<std::uint64_t>(index));
    const ScheduleCase c = random_case(random, 1, 4);
    std::vector<core::Schedule> schedules{lowered(c)};
    if (random() % 4 == 0) {
      const bool is_v = schedules.front().shape.style == core::Style::kV;
      schedules.push_back(lowered_evaluation(is_v ? c.name : "aiao", c.pp, c.segments, c.micro_batches));
    }
    RunSetup run{.schedules = std::move(schedules),
                 .loopback = {.max_delay = std::chrono::microseconds(random() % 3 * 150),
                              .seed = static_cast<std::uint64_t>(index)},
                 .options = {.timeout = 60s, .receive_ahead = static_cast<int>(random() % 5)},
                 .steps = 1 + static_cast<int>(random() % 2),
                 .max_compute_us = static_cast<int>(random() % 3 * 100)};
    expect_clean(run, "run " + std::to_string(index) + ": " + to_string(c));
    if (HasFailure()) return;
  }
}

TEST(Schedules,
     EverythingInLockStep) {  // no message ahead of the program counter, no delays: pure rendezvous
  for (const ScheduleCase& c :
       {ScheduleCase{"gpipe", 2, 1, 4, 0}, ScheduleCase{"1f1b", 4, 1, 6, 0}, ScheduleCase{"interleaved", 2, 3, 5, 0},
        ScheduleCase{"aiao", 4, 2, 3, 0}, ScheduleCase{"aiao", 3, 2, 1, 0}}) {
    expect_clean({.schedules = {lowered(c)}, .options = {.timeout = 60s, .receive_ahead = 0}}, to_string(c));
  }
}

TEST(Schedules, SplitBackwardRuns) {
  const core::Schedule compute = core::parse_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n");
  expect_clean({.schedules = {core::lower(compute, {.reduce = true})}, .options = {.timeout = 60s}}, "split");
}

TEST(Schedules, TrainingAndEvaluationTakeTurnsOnOneCommunicator) {
  expect_clean({.schedules = {lowered("aiao", 3, 2, 4), lowered_evaluation("aiao", 3, 2, 7),
                              lowered("interleaved", 3, 2, 2), lowered_evaluation("aiao", 3, 2, 1)},
                .loopback = {.max_delay = 100us},
                .options = {.timeout = 60s},
                .steps = 9,
                .max_compute_us = 50},
               "train and evaluate");
}

}  // namespace
}  // namespace fold3d::test
