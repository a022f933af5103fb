// The gate within one process: who waits for whom, and for how long.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <future>
#include <limits>
#include <stdexcept>
#include <thread>
#include <vector>

#include "comm/arbiter/host_gate.h"
#include "comm/arbiter/reduce_turn.h"
#include "comm/base/clock.h"
#include "core/network/arbiter.h"

namespace fold3d::test {
namespace {

using comm::HostGate;
using Direction = HostGate::Direction;
using Traffic = HostGate::Traffic;

constexpr std::int64_t kMillisecond = 1'000'000;
constexpr std::int64_t kForever = 60'000 * kMillisecond;  // longer than a test takes
constexpr std::int64_t kShort = 100 * kMillisecond;       // still longer than this process may be kept from running
const HostGate::Options kPatient{.arbiter = {.message_patience_ns = kForever, .chunk_patience_ns = kForever}};

HostGate::Options patience(std::int64_t message_ns, std::int64_t chunk_ns) {
  return {.arbiter = {.message_patience_ns = message_ns, .chunk_patience_ns = chunk_ns}};
}

TEST(Arbiter, PipelineGoesFirstWithBoundedPatience) {
  const core::Arbiter arbiter({.message_patience_ns = 10, .chunk_patience_ns = 25});
  EXPECT_EQ(arbiter.start_ns(100, {.pending = 0, .newest_ns = 99}), 100);  // silence: at once
  EXPECT_EQ(arbiter.start_ns(100, {.pending = 1, .newest_ns = 98}),
            108);  // a message holds it back for its patience
  EXPECT_EQ(arbiter.start_ns(100, {.pending = 3, .newest_ns = 114}), 124);
  EXPECT_EQ(arbiter.start_ns(100, {.pending = 3, .newest_ns = 124}),
            125);  // but no stream of messages for ever
  EXPECT_LE(arbiter.start_ns(100, {.pending = 1, .newest_ns = 50}),
            100);  // a message stuck at its receiver: at once
}

TEST(Arbiter, PatienceGrowsWithTheTimeAMessageTakes) {
  const core::Arbiter arbiter({.message_patience_ns = 10, .chunk_patience_ns = 25});
  EXPECT_EQ(arbiter.start_ns(100, {.pending = 1, .newest_ns = 100, .transfer_ns = 40}), 190);
  EXPECT_EQ(arbiter.start_ns(100, {.pending = 1, .newest_ns = 900, .transfer_ns = 40}), 205);
  EXPECT_LE(
      arbiter.start_ns(0, {.pending = 1, .newest_ns = 0, .transfer_ns = std::numeric_limits<std::int64_t>::max()}),
      2 * core::Arbiter::kLongestTransferNs + 10);  // a wrong measurement does not stop the traffic
  core::Arbiter::Pipeline pipeline;
  pipeline.begins(5, 40);
  pipeline.begins(6, 30);
  EXPECT_EQ(pipeline.transfer_ns, 40);
  pipeline.ends();
  pipeline.ends();
  pipeline.begins(7, 20);
  EXPECT_EQ(pipeline.transfer_ns, 20);
  EXPECT_EQ(pipeline.newest_ns, 7);
  EXPECT_EQ(pipeline.pending, 1);
}

TEST(HostGate, HoldsUntilThePipelineIsSilent) {
  HostGate gate("", kPatient);
  EXPECT_EQ(gate.hold(Direction::kSend, Traffic::kReduce), 0);
  gate.message_begins(Direction::kSend, 100);
  gate.message_begins(Direction::kSend, 50);
  std::atomic<bool> ended{false};
  auto chunk = std::async(std::launch::async, [&] {
    gate.hold(Direction::kSend, Traffic::kReduce);
    return ended.load();
  });
  gate.message_ends(Direction::kSend);
  ended.store(true);
  gate.message_ends(Direction::kSend);
  EXPECT_TRUE(chunk.get());
  EXPECT_EQ(gate.counters().messages, 2);
  EXPECT_EQ(gate.counters().message_bytes, 150);
}

TEST(HostGate, TheDirectionsAreIndependent) {
  HostGate gate("", kPatient);
  gate.message_begins(Direction::kReceive, 1);
  EXPECT_EQ(gate.hold(Direction::kSend, Traffic::kReduce), 0);
  EXPECT_EQ(gate.hold(Direction::kSend, Traffic::kGather), 0);
  gate.message_ends(Direction::kReceive);
  gate.message_begins(Direction::kSend, 1);
  EXPECT_EQ(gate.hold(Direction::kReceive, Traffic::kGather), 0);
}

TEST(HostGate, GathersYieldToReducesAndReducesToNone) {
  HostGate gate("", patience(kShort, kForever));
  gate.reduce_begins();
  EXPECT_EQ(gate.hold(Direction::kSend, Traffic::kReduce), 0);
  EXPECT_GT(gate.hold(Direction::kSend, Traffic::kGather), 0);  // nobody ends it: patience does
  EXPECT_EQ(gate.counters().yields, 1);
  EXPECT_EQ(gate.counters().preemptions, 0);
  gate.reduce_ends();
  EXPECT_EQ(gate.hold(Direction::kSend, Traffic::kGather), 0);
}

TEST(HostGate, AGatherFindsNoGapBetweenTheChunksOfAReduce) {
  HostGate gate("", kPatient);
  comm::ReduceTurn turn(gate, Traffic::kReduce, true);
  turn.take(64);
  std::atomic<bool> passed{false};
  auto gather = std::async(std::launch::async, [&] {
    gate.hold(Direction::kSend, Traffic::kGather);
    passed = true;
  });
  for (int chunk = 0; chunk < 10'000; ++chunk) {
    turn.take(64);
    std::this_thread::yield();
  }
  EXPECT_FALSE(passed);
  turn.leave();
  gather.get();
  turn.leave();  // once more is nothing
  EXPECT_EQ(gate.hold(Direction::kSend, Traffic::kGather), 0);
  comm::ReduceTurn none(gate, Traffic::kGather, true);
  none.take(64);
  EXPECT_EQ(gate.hold(Direction::kSend, Traffic::kGather), 0);
}

TEST(HostGate, PatienceEnds) {
  HostGate gate("", patience(kShort, kForever));
  const std::int64_t before = comm::now_ns();
  gate.message_begins(Direction::kSend, 1);
  const std::int64_t held = gate.hold(Direction::kSend, Traffic::kReduce);
  EXPECT_GE(comm::now_ns() - before, kShort);
  EXPECT_GT(held, 0);
  EXPECT_EQ(gate.hold(Direction::kSend, Traffic::kReduce), 0);  // the message had its time
  EXPECT_EQ(gate.counters().preemptions, 1);
  EXPECT_EQ(gate.counters().held_ns, held);
}

TEST(HostGate, CountsWhatMessagesWaitForChunksUnderWay) {
  HostGate gate("", kPatient);
  constexpr std::int64_t kChunk = 1'000'000'000;
  gate.passed(Direction::kSend, 0, kChunk);
  EXPECT_EQ(gate.counters().delayed_ns, 0);  // nobody waited
  const std::int64_t before = comm::now_ns();
  gate.message_begins(Direction::kSend, 1);
  const std::int64_t after = comm::now_ns();
  gate.passed(Direction::kSend, before - kChunk, after + kChunk);  // half of it was over when the message came
  gate.passed(Direction::kReceive, before - kChunk, after + kChunk);
  EXPECT_GE(gate.counters().delayed_ns, kChunk);
  EXPECT_LE(gate.counters().delayed_ns, kChunk + after - before);
  gate.passed(Direction::kSend, after, after + kChunk);  // went ahead because patience was over
  EXPECT_GE(gate.counters().delayed_ns, 2 * kChunk);
}

TEST(HostGate, OnlyWaitsForMessagesArePreemption) {
  HostGate gate("", patience(kShort, kForever));
  gate.reduce_begins();
  const std::int64_t yielded = gate.hold(Direction::kSend, Traffic::kGather);
  EXPECT_EQ(gate.counters().preempted_ns, 0);
  gate.message_begins(Direction::kSend, 1);
  const std::int64_t preempted = gate.hold(Direction::kSend, Traffic::kReduce);
  EXPECT_EQ(gate.counters().preempted_ns, preempted);
  EXPECT_EQ(gate.counters().held_ns, yielded + preempted);
}

TEST(HostGate, AMessageGetsTwiceTheTimeItTakes) {
  HostGate gate("", patience(0, 0));
  gate.message_begins(Direction::kSend, 1'000);  // at a speed not known yet
  EXPECT_EQ(gate.hold(Direction::kSend, Traffic::kReduce), 0);
  gate.message_ends(Direction::kSend);
  gate.set_bandwidth(100'000);
  const std::int64_t before = comm::now_ns();
  gate.message_begins(Direction::kSend, 1'000);  // 10 ms
  gate.hold(Direction::kSend, Traffic::kReduce);
  EXPECT_GE(comm::now_ns() - before, 20 * kMillisecond);
  for (const double wrong : {-1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    EXPECT_THROW(gate.set_bandwidth(wrong), std::invalid_argument);
  }
}

TEST(HostGate, WithoutPreemptionNobodyWaits) {
  HostGate::Options options = kPatient;
  options.preempt = false;
  HostGate gate("", options);
  gate.message_begins(Direction::kSend, 1);
  gate.reduce_begins();
  EXPECT_EQ(gate.hold(Direction::kSend, Traffic::kGather), 0);
  EXPECT_EQ(gate.counters().messages, 1);
}

TEST(HostGate, OpenEndsAHoldForEver) {
  HostGate gate("", kPatient);
  gate.message_begins(Direction::kSend, 1);
  auto chunk = std::async(std::launch::async, [&] { gate.hold(Direction::kSend, Traffic::kReduce); });
  gate.open();
  chunk.get();
  gate.message_ends(Direction::kSend);  // it was taken back: counts nothing
  gate.message_begins(Direction::kSend, 1);
  EXPECT_EQ(gate.hold(Direction::kSend, Traffic::kGather), 0);
}

TEST(HostGate, ManyThreadsLeaveNobodyWaiting) {
  HostGate gate("", kPatient);
  constexpr int kRounds = 2'000;
  std::vector<std::thread> threads;
  for (const Direction direction : {Direction::kSend, Direction::kReceive}) {
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&gate, direction] {
        for (int k = 0; k < kRounds; ++k) {
          gate.message_begins(direction, 64);
          gate.set_bandwidth(1e9 + k);
          gate.message_ends(direction);
        }
      });
    }
    threads.emplace_back([&gate, direction] {
      for (int k = 0; k < kRounds; ++k) gate.hold(direction, k % 2 == 0 ? Traffic::kGather : Traffic::kReduce);
    });
  }
  threads.emplace_back([&gate] {
    for (int k = 0; k < kRounds; ++k) {
      gate.hold(Direction::kSend, Traffic::kReduce);
      gate.reduce_begins(64);
      gate.reduce_ends();
    }
  });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(gate.hold(Direction::kSend, Traffic::kGather), 0);
  EXPECT_EQ(gate.hold(Direction::kReceive, Traffic::kGather), 0);
  EXPECT_EQ(gate.counters().messages, 4 * kRounds);
}

}  // namespace
}  // namespace fold3d::test
