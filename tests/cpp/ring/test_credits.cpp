// How much data-parallel traffic may be on its way: slice and buffer sizes by speed, the measured speed, the arbiter.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/arbiter/nic_arbiter.h"
#include "comm/ring/credits.h"
#include "harness/ring_harness.h"

namespace fold3d::test {
namespace {

using comm::BandwidthMeter;
using comm::Credits;
using comm::NicArbiter;
using comm::SendQueue;

TEST(Credits, ASliceIsWorthAFixedTimeWithinBounds) {
  Credits credits(0);
  EXPECT_EQ(credits.slice_bytes(), 64u << 10);  // nothing known yet
  EXPECT_EQ(credits.waiting_bytes(), 0u);
  credits.set_bandwidth(128e6);  // about 1 Gbit/s
  EXPECT_EQ(credits.slice_bytes(), 128'000u);
  EXPECT_EQ(credits.waiting_bytes(), 51'200u);
  credits.set_bandwidth(1e6);
  EXPECT_EQ(credits.slice_bytes(), 8u << 10);
  EXPECT_EQ(credits.waiting_bytes(), 4u << 10);
  credits.set_bandwidth(1e12);
  EXPECT_EQ(credits.slice_bytes(), 4u << 20);
}

TEST(Credits, WhatAMessageMayFindAheadIsASliceAndABuffer) {
  EXPECT_EQ(Credits::pause_bytes(128e6), 128'000u + 51'200u);
  EXPECT_EQ(Credits::pause_bytes(1.0), (8u << 10) + (4u << 10));
  EXPECT_THROW(Credits::pause_bytes(0.0), std::invalid_argument);
  EXPECT_THROW(Credits::pause_bytes(std::numeric_limits<double>::infinity()), std::invalid_argument);
}

TEST(Credits, AFixedSliceStaysButCutsNoElement) {
  Credits credits(1000);
  credits.set_bandwidth(1e9);
  EXPECT_EQ(credits.slice_bytes(), 960u);
  EXPECT_EQ(Credits(1).slice_bytes(), 64u);
}

/// A line of 1e9 bytes per second and 2 ms there and back, of which the system takes 100 kB to send.
class Line {
 public:
  void send(BandwidthMeter& meter, std::size_t bytes) {
    meter.begins(now_, queue());
    sent_ += bytes;
    begun_ns_ = std::max(begun_ns_, now_);
    ends_.emplace_back(begun_ns_ += static_cast<std::int64_t>(bytes), sent_);
    now_ = std::max(now_ + 1'000, begun_ns_ - 100'000);
    meter.ends(now_, bytes, queue());
  }
  void rests(std::int64_t ns) { now_ += ns; }

 private:
  SendQueue queue() const {
    std::size_t arrived = 0;
    for (const auto& [end, bytes] : ends_) {
      if (end + 2'000'000 <= now_) arrived = bytes;
    }
    return {.arrived = arrived,
            .waiting = static_cast<std::size_t>(std::max<std::int64_t>(begun_ns_ - now_, 0)),
            .is_empty = arrived == sent_};
  }

  std::int64_t now_ = 0, begun_ns_ = 0;
  std::size_t sent_ = 0;
  std::vector<std::pair<std::int64_t, std::size_t>> ends_;
};

TEST(BandwidthMeter, CountsWhatArrivesWhileThereIsSomethingToSend) {
  for (const std::size_t slices : {40u, 400u}) {
    BandwidthMeter meter;
    EXPECT_EQ(meter.bandwidth(), 0.0);
    Line line;
    for (int step = 0; step < 4; ++step) {  // each begins with an empty line
      for (std::size_t slice = 0; slice < slices; ++slice) line.send(meter, 100'000);
      line.rests(50'000'000);
    }
    EXPECT_NEAR(meter.bandwidth(), 1e9, 5e7) << slices;
  }
}

TEST(BandwidthMeter, CountsConnectionsThatShareACardTogether) {
  // Two that send slices of 100 kB in turn at 1e9 bytes per second, for 10 ms each time.
  constexpr std::int64_t kHalf = 100'000, kTurns = 100, kRest = 50'000'000;
  BandwidthMeter meter;
  std::int64_t now = 0;
  std::uint64_t arrived = 0;
  const auto busy = [&] { return SendQueue{.arrived = arrived, .waiting = 50'000, .is_empty = false}; };
  for (int step = 0; step < 30; ++step) {
    meter.begins(now, {.arrived = arrived});
    for (std::int64_t turn = 1; turn < kTurns; ++turn) {  // in each the other one's slice ends, which was the first
      now += kHalf;
      arrived += 100'000;
      if (turn > 1) meter.ends(now, 100'000, busy());
      meter.begins(now, busy());
    }
    for (int last = 0; last < 2; ++last) meter.ends(now, 100'000, busy());
    now += kRest;
  }
  EXPECT_NEAR(meter.bandwidth(), 1e9, 2e7);
}

TEST(BandwidthMeter, CountsWhatIsSentWhereNothingElseIsKnown) {
  constexpr SendQueue kUnknown{.is_known = false};
  BandwidthMeter meter;
  std::int64_t now = 0;
  for (int slice = 0; slice < 5000; ++slice) {
    meter.begins(now, kUnknown);
    meter.ends(now += 200'000, 100'000, kUnknown);
    now += 1'000'000;  // idle: does not count
  }
  EXPECT_NEAR(meter.bandwidth(), 0.5e9, 1e7);
}

TEST(BandwidthMeter, SustainedIsTheMeanOfWindowsAndBandwidthTheFastest) {
  constexpr SendQueue kUnknown{.is_known = false};
  BandwidthMeter meter;
  std::int64_t now = 0;
  const auto window = [&](double speed) {
    for (bool ended = false; !ended;) {
      meter.begins(now, kUnknown);
      ended = meter.ends(now += 1'000'000, static_cast<std::size_t>(speed / 1e3), kUnknown);
    }
  };
  EXPECT_EQ(meter.sustained(), 0.0);
  window(1e8);
  EXPECT_NEAR(meter.sustained(), 1e8, 1e6);
  for (int i = 0; i < 200; ++i) window(i % 4 == 0 ? 1.2e8 : 1e8);
  EXPECT_NEAR(meter.sustained(), 1.05e8, 2e6);
  EXPECT_NEAR(meter.bandwidth(), 1.2e8, 1e6);
  for (int i = 0; i < 100; ++i) window(5e7);  // the link is slower by now
  EXPECT_NEAR(meter.sustained(), 5e7, 1e6);
}

/// A link of 1e8 bytes per second and 10 ms that needs `needed` seconds in flight beyond two round trips.
double speed_with(std::size_t window, double needed) {
  const double enough = 1e8 * (2 * 0.01 + needed);
  return window == 0 ? 1e8 : 1e8 * std::min(1.0, static_cast<double>(window) / enough);
}

TEST(FlightLimit, GoesUpUntilTheSpeedIsThatWithoutALimit) {
  for (const double needed : {0.0, 0.005, 0.03}) {
    comm::FlightLimit limit;
    EXPECT_EQ(limit.bytes(1e8, 0.01), 0u);  // nothing known yet
    double sum = 0.0;
    for (int window = 0; window < 400; ++window) {
      const double speed = speed_with(limit.bytes(1e8, 0.01), needed);
      limit.measured(speed, true);
      sum += speed;
    }
    EXPECT_GT(sum / 400, 0.93e8) << needed;
    EXPECT_LE(limit.bytes(1e8, 0.01), 1e8 * (2 * 0.01 + std::max(2.1 * needed, 4.1e-4))) << needed;
    EXPECT_GE(limit.bytes(1e8, 0.01), 1e8 * 2 * 0.01) << needed;
    int window = 0;
    while (limit.bytes(1e8, 0.01) > 0 && window < 40) limit.measured(1e7, true), ++window;
    EXPECT_LT(window, 40);  // lifted: whatever slows it down, it is not this
  }
}

TEST(FlightLimit, StaysWhileSomethingElseWantsTheCard) {
  comm::FlightLimit limit;
  for (int window = 0; window < 100; ++window) limit.measured(window % 2 == 0 ? 1e8 : 4e7, false);
  EXPECT_NEAR(static_cast<double>(limit.bytes(1e8, 0.0)), 1e8 * 4e-4, 1.0);
}

class SlicesWait : public testing::TestWithParam<comm::NicArbiter::Direction> {};

TEST_P(SlicesWait, ForMessagesButNotForEver) {
  constexpr std::int64_t kPatience = 500'000'000;  // a busy machine may take the usual 5 ms to get to the first slice
  const Replicas replicas{
      .slice_bytes = 64,
      .gate_options = {.rule = {.message_patience_ns = kPatience, .slice_patience_ns = kPatience}},
  };
  const auto errors = replicas.run([&](int rank, comm::BucketSync& sync) {
    const TestBucket<float> bucket(0, contents<float>(rank, 0, 1, 64));
    comm::NicArbiter& arbiter = *replicas.arbiter(rank);
    arbiter.message_begins(GetParam(), 0);  // and never ends: the other side is stuck
    sync.begin(1, {});
    sync.reduce(bucket.collective());
    sync.wait_reduced(0);
    EXPECT_EQ(bucket.shard(rank, 2), reduced<float>(rank, 2, 0, 1, 64, 1.0));
    EXPECT_GE(arbiter.counters().preemptions, 1);
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"", ""}));
}

INSTANTIATE_TEST_SUITE_P(BothWays, SlicesWait,
                         testing::Values(comm::NicArbiter::Direction::kSend, comm::NicArbiter::Direction::kReceive));

/// Messages are pending for as long as the test runs: a slice that waited for them would end it by the timeout.
TEST(SlicesWithinAHost, WaitForNobody) {
  constexpr std::int64_t kForever = 600'000'000'000;
  const NicArbiter::Options patient{.rule = {.message_patience_ns = kForever, .slice_patience_ns = kForever}};
  const Replicas together{.gate_options = patient, .hosts = {3, 3}};
  const auto errors = together.run([&](int rank, comm::BucketSync& sync) {
    const TestBucket<float> bucket(0, contents<float>(rank, 0, 1, 64));
    NicArbiter& arbiter = *together.arbiter(rank);
    for (const auto direction : {NicArbiter::Direction::kSend, NicArbiter::Direction::kReceive}) {
      arbiter.message_begins(direction, 0);
    }
    arbiter.slice_begins();  // another stage's, through the card
    sync.begin(1, {0});
    sync.reduce(bucket.collective());
    sync.wait_reduced(0);
    sync.wait_gathered(0);
    EXPECT_EQ(arbiter.counters().preemptions + arbiter.counters().yields, 0);
    EXPECT_EQ(arbiter.counters().delayed_ns, 0);
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"", ""}));
}

TEST(SlicesWithinAHost, AreToldApartByNeighbour) {
  constexpr std::int64_t kPatience = 200'000'000;
  const Replicas replicas{
      .size = 3,
      .slice_bytes = 64,
      .gate_options = {.rule = {.message_patience_ns = kPatience, .slice_patience_ns = kPatience}},
      .hosts = {3, 3, 5},
  };
  const auto errors = replicas.run([&](int rank, comm::BucketSync& sync) {
    const TestBucket<float> bucket(0, contents<float>(rank, 0, 1, 48));
    NicArbiter& arbiter = *replicas.arbiter(rank);
    arbiter.message_begins(NicArbiter::Direction::kSend, 0);
    sync.begin(1, {});
    sync.reduce(bucket.collective());
    sync.wait_reduced(0);
    sync.wait_gathered(0);
    const bool leaves_host = rank != 0;  // from 0 to 1 stays within
    EXPECT_EQ(arbiter.counters().preemptions > 0, leaves_host) << "replica " << rank;
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"", "", ""}));
}

TEST(SlicesWithinAHost, SayNothingOfTheCardsSpeed) {
  constexpr std::int64_t kPatience = 20'000'000;
  const Replicas replicas{
      .slice_bytes = 1 << 12,
      .over_tcp = true,
      .gate_options = {.rule = {.message_patience_ns = kPatience, .slice_patience_ns = kPatience}},
      .hosts = {3, 3},
  };
  const auto errors = replicas.run([&](int rank, comm::BucketSync& sync) {
    for (int step = 1; step <= 4; ++step) {
      const TestBucket<float> bucket(0, contents<float>(rank, 0, step, 1 << 16));
      sync.begin(step, {});
      sync.reduce(bucket.collective());
      sync.wait_reduced(0);
    }
    // At a known speed, a message of a gigabyte would be waited for, for longer.
    NicArbiter& arbiter = *replicas.arbiter(rank);
    arbiter.message_begins(NicArbiter::Direction::kSend, 1 << 30);
    EXPECT_LT(arbiter.hold(NicArbiter::Direction::kSend, NicArbiter::Traffic::kReduce), 10 * kPatience);
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"", ""}));
}

TEST(SlicesHeld, DoNotHoldUpClosing) {
  constexpr std::int64_t kPatience = 60'000'000'000;
  const Replicas replicas{
      .gate_options = {.rule = {.message_patience_ns = kPatience, .slice_patience_ns = kPatience}},
  };
  const auto errors = replicas.run([&](int rank, comm::BucketSync& sync) {
    const TestBucket<float> bucket(0, contents<float>(rank, 0, 1, 64));
    replicas.arbiter(rank)->message_begins(comm::NicArbiter::Direction::kSend, 0);  // and never ends
    sync.begin(1, {});
    sync.reduce(bucket.collective());
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the slice gets to the arbiter; else nothing is shown
    const auto start = std::chrono::steady_clock::now();
    sync.close();
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"", ""}));
}

}  // namespace
}  // namespace fold3d::test
