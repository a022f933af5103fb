// A rank fails or stops somewhere in a step: every rank of its pipeline ends with an error that tells the
// cause.
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <string>
#include <vector>

#include "harness/comm_harness.h"

namespace fold3d::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr int kMicroBatches = 4;

#if defined(__SANITIZE_THREAD__)
constexpr int kRuns = 30;
#else
constexpr int kRuns = 100;
#endif

RunSetup random_setup(std::mt19937_64& random, comm::Fault::Mode mode) {
  static const std::string kNames[] = {"gpipe", "interleaved", "aiao"};
  const std::string name = kNames[random() % 3];
  const int pp = 2 + static_cast<int>(random() % 3);
  const int segments = name == "gpipe" ? 1 : 2;
  comm::Fault fault{.stage = static_cast<int>(random() % static_cast<unsigned>(pp)),
                    .call = static_cast<comm::Fault::Call>(random() % 2),
                    .mode = mode};
  // Every rank makes at least so many calls of each kind in the first step.
  fault.after = static_cast<int>(random() % kMicroBatches);
  return {.schedules = {lowered(name, pp, segments, kMicroBatches)},
          .loopback = {.max_delay = std::chrono::microseconds(random() % 2 * 100), .seed = random(), .faults = {fault}},
          .options = {.timeout = 60s},
          .steps = 3,  // by the third step every rank has needed every other
          .max_compute_us = 50};
}

void expect_all(const RunSetup& setup, const std::string& cause, const std::string& what) {
  for (const std::string& error : run_ranks(setup)) {
    EXPECT_NE(error.find(cause), std::string::npos) << what << ": \"" << error << "\" does not tell \"" << cause << '"';
  }
}

TEST(Faults, AnExceptionInTheTransportEndsEveryRankWithItsCause) {
  const auto begin = Clock::now();
  for (int index = 0; index < kRuns; ++index) {
    std::mt19937_64 random(static_cast<std::uint64_t>(index));
    expect_all(random_setup(random, comm::Fault::Mode::kThrow), "injected failure", "run " + std::to_string(index));
    if (HasFailure()) return;
  }
  EXPECT_LT(Clock::now() - begin, 55s);  // nobody had to wait for a time-out
}

TEST(Faults, ASilentStopEndsEveryRankWithinTheTimeout) {
  for (int index = 0; index < 4; ++index) {
    std::mt19937_64 random(1000 + static_cast<std::uint64_t>(index));
    RunSetup setup = random_setup(random, comm::Fault::Mode::kStop);
    setup.options.timeout = 400ms;
    const auto begin = Clock::now();
    expect_all(setup, "comm_timeout", "run " + std::to_string(index));
    EXPECT_LT(Clock::now() - begin, 10s);
  }
}

TEST(Faults, TheErrorNamesRankActionPeerAndCause) {
  RunSetup setup{.schedules = {lowered("gpipe", 2, 1, 2)},
                 .loopback = {.faults = {{.stage = 0, .call = comm::Fault::Call::kSend}}},
                 .options = {.timeout = 60s}};
  const std::vector<std::string> errors = run_ranks(setup);
  const std::string own = "stage 0: 0SEND_F0 to stage 1 failed: injected failure";
  EXPECT_EQ(errors.at(0), own);
  EXPECT_EQ(errors.at(1).substr(0, errors.at(1).find(" failed")), "stage 1: 1RECV_F0 from stage 0");
  EXPECT_NE(errors.at(1).find(own), std::string::npos) << errors.at(1);
}

}  // namespace
}  // namespace fold3d::test
