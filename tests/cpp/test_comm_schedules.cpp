// Whole lowered schedules over the loopback transport, ranks = threads, with random delays in transport and
// compute: every message has the right content, id and order, and nothing hangs.
// FOLD3D_STRESS_RUNS sets the number of random runs.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "comm_harness.h"
#include "core/lower.h"
#include "core/schedule.h"

namespace fold3d::test {
namespace {

using namespace std::chrono_literals;

void expect_clean(const RunSetup& run, const std::string& what) {
  for (const std::string& error : run_ranks(run)) EXPECT_EQ(error, "") << what;
}

struct Case {
  std::string name;
  int pp, segments, micro_batches, group_size;
};

std::string text(const Case& c) {
  return c.name + " pp=" + std::to_string(c.pp) + " segments=" + std::to_string(c.segments) +
         " m=" + std::to_string(c.micro_batches) + " N=" + std::to_string(c.group_size);
}

Case random_case(std::mt19937_64& random) {
  static const std::string kNames[] = {"gpipe", "1f1b", "interleaved", "fold", "aiao"};
  Case c{.name = kNames[random() % 5], .pp = 0, .segments = 1, .micro_batches = 0, .group_size = 0};
  c.pp = 1 + static_cast<int>(random() % 4);
  c.micro_batches = 1 + static_cast<int>(random() % 8);
  if (c.name != "1f1b" && c.name != "gpipe") c.segments = 1 + static_cast<int>(random() % 3);
  if (c.name == "fold") c.group_size = 1 + static_cast<int>(random() % static_cast<unsigned>(c.micro_batches));
  return c;
}

int stress_runs(int normal) {
  const char* const wanted = std::getenv("FOLD3D_STRESS_RUNS");
  return wanted == nullptr ? normal : std::atoi(wanted);
}

#if defined(__SANITIZE_THREAD__)
constexpr int kRuns = 60;
#else
constexpr int kRuns = 300;
#endif

TEST(Schedules, RandomRunsWithRandomDelays) {
  const int runs = stress_runs(kRuns);
  for (int index = 0; index < runs; ++index) {
    std::mt19937_64 random(static_cast<std::uint64_t>(index));
    const Case c = random_case(random);
    RunSetup run{.schedules = {lowered(c.name, c.pp, c.segments, c.micro_batches, c.group_size)},
                 .loopback = {.max_delay = std::chrono::microseconds(random() % 3 * 150),
                              .seed = static_cast<std::uint64_t>(index)},
                 .options = {.timeout = 60s, .receive_ahead = static_cast<int>(random() % 5)},
                 .steps = 1 + static_cast<int>(random() % 2),
                 .max_compute_us = static_cast<int>(random() % 3 * 100)};
    expect_clean(run, "run " + std::to_string(index) + ": " + text(c));
    if (HasFailure()) return;
  }
}

TEST(Schedules,
     EverythingInLockStep) {  // no message ahead of the program counter, no delays: pure rendezvous
  for (const Case& c : {Case{"gpipe", 2, 1, 4, 0}, Case{"1f1b", 4, 1, 6, 0}, Case{"interleaved", 2, 3, 5, 0},
                        Case{"aiao", 4, 2, 3, 0}, Case{"aiao", 3, 2, 1, 0}}) {
    expect_clean({.schedules = {lowered(c.name, c.pp, c.segments, c.micro_batches)},
                  .options = {.timeout = 60s, .receive_ahead = 0}},
                 text(c));
  }
}

TEST(Schedules, SplitBackwardRuns) {
  const core::Schedule compute = core::parse_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n");
  expect_clean({.schedules = {core::lower(compute, true)}, .options = {.timeout = 60s}}, "split");
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
