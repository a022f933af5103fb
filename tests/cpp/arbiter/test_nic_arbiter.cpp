// The arbiter within one process: who waits for whom, and for how long.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <limits>
#include <stdexcept>
#include <thread>
#include <vector>

#include "comm/arbiter/nic_arbiter.h"
#include "comm/arbiter/turn.h"
#include "comm/base/clock.h"
#include "core/network/hold_rule.h"

namespace fold3d::test {
namespace {

using comm::NicArbiter;
using Direction = NicArbiter::Direction;
using Traffic = NicArbiter::Traffic;

constexpr std::int64_t kMillisecond = 1'000'000;
constexpr std::int64_t kForever = 60'000 * kMillisecond;  // longer than a test takes
constexpr std::int64_t kShort = 100 * kMillisecond;       // still longer than this process may be kept from running
const NicArbiter::Options kPatient{.rule = {.message_patience_ns = kForever, .slice_patience_ns = kForever}};

NicArbiter::Options patience(std::int64_t message_ns, std::int64_t slice_ns) {
  return {.rule = {.message_patience_ns = message_ns, .slice_patience_ns = slice_ns}};
}

TEST(HoldRule, PipelineGoesFirstWithBoundedPatience) {
  const core::HoldRule rule({.message_patience_ns = 10, .slice_patience_ns = 25});
  EXPECT_EQ(rule.start_ns(100, {.pending = 0, .newest_ns = 99}), 100);  // silence: at once
  EXPECT_EQ(rule.start_ns(100, {.pending = 1, .newest_ns = 98}),
            108);  // a message holds it back for its patience
  EXPECT_EQ(rule.start_ns(100, {.pending = 3, .newest_ns = 114}), 124);
  EXPECT_EQ(rule.start_ns(100, {.pending = 3, .newest_ns = 124}),
            125);  // but no stream of messages for ever
  EXPECT_LE(rule.start_ns(100, {.pending = 1, .newest_ns = 50}),
            100);  // a message stuck at its receiver: at once
}

TEST(HoldRule, PatienceGrowsWithTheTimeAMessageTakes) {
  const core::HoldRule rule({.message_patience_ns = 10, .slice_patience_ns = 25});
  EXPECT_EQ(rule.start_ns(100, {.pending = 1, .newest_ns = 100, .transfer_ns = 40}), 190);
  EXPECT_EQ(rule.start_ns(100, {.pending = 1, .newest_ns = 900, .transfer_ns = 40}), 205);
  EXPECT_LE(rule.start_ns(0, {.pending = 1, .newest_ns = 0, .transfer_ns = std::numeric_limits<std::int64_t>::max()}),
            2 * core::HoldRule::kLongestTransferNs + 10);  // a wrong measurement does not stop the traffic
  core::HoldRule::Pipeline pipeline;
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

TEST(NicArbiter, TellsHowLongTheLargestPendingTransferTakes) {
  NicArbiter arbiter;
  arbiter.set_bandwidth(1e9);
  EXPECT_EQ(arbiter.longest_ns(Direction::kReceive, Traffic::kReduce), 0);
  arbiter.message_begins(Direction::kReceive, 4'000'000);
  arbiter.message_begins(Direction::kReceive, 1'000'000);
  EXPECT_EQ(arbiter.longest_ns(Direction::kReceive, Traffic::kReduce), 4 * kMillisecond);
  EXPECT_EQ(arbiter.longest_ns(Direction::kSend, Traffic::kReduce), 0);
  arbiter.message_ends(Direction::kReceive);
  arbiter.message_ends(Direction::kReceive);
  EXPECT_EQ(arbiter.longest_ns(Direction::kReceive, Traffic::kReduce), 0);
}

TEST(NicArbiter, HoldsUntilThePipelineIsSilent) {
  NicArbiter arbiter("", kPatient);
  EXPECT_EQ(arbiter.hold(Direction::kSend, Traffic::kReduce), 0);
  arbiter.message_begins(Direction::kSend, 100);
  arbiter.message_begins(Direction::kSend, 50);
  std::atomic<bool> ended{false};
  auto slice = std::async(std::launch::async, [&] {
    arbiter.hold(Direction::kSend, Traffic::kReduce);
    return ended.load();
  });
  arbiter.message_ends(Direction::kSend);
  ended.store(true);
  arbiter.message_ends(Direction::kSend);
  EXPECT_TRUE(slice.get());
  EXPECT_EQ(arbiter.counters().messages, 2);
  EXPECT_EQ(arbiter.counters().message_bytes, 150);
}

TEST(NicArbiter, TheDirectionsAreIndependent) {
  NicArbiter arbiter("", kPatient);
  arbiter.message_begins(Direction::kReceive, 1);
  EXPECT_EQ(arbiter.hold(Direction::kSend, Traffic::kReduce), 0);
  EXPECT_EQ(arbiter.hold(Direction::kSend, Traffic::kGather), 0);
  arbiter.message_ends(Direction::kReceive);
  arbiter.message_begins(Direction::kSend, 1);
  EXPECT_EQ(arbiter.hold(Direction::kReceive, Traffic::kGather), 0);
}

TEST(NicArbiter, ASliceOfACollectiveWaitsForMessagesOfBothDirections) {
  NicArbiter arbiter("", kPatient);
  EXPECT_EQ(arbiter.hold_both_ways(Traffic::kGather), 0);
  for (const Direction direction : {Direction::kSend, Direction::kReceive}) {
    arbiter.message_begins(direction, 1);
    EXPECT_GE(arbiter.hold_both_ways(Traffic::kReduce, kShort), kShort);  // no longer than was said
    std::atomic<bool> ended{false};
    auto slice = std::async(std::launch::async, [&] {
      arbiter.hold_both_ways(Traffic::kReduce);
      return ended.load();
    });
    ended.store(true);
    arbiter.message_ends(direction);
    EXPECT_TRUE(slice.get());
    arbiter.tensor_begins(direction, 1);
    EXPECT_GE(arbiter.hold_both_ways(Traffic::kReduce, kShort), kShort);
    arbiter.tensor_ends(direction);
  }
  EXPECT_EQ(arbiter.counters().yields, 0);
  arbiter.slice_begins();
  EXPECT_EQ(arbiter.hold_both_ways(Traffic::kReduce), 0);
  EXPECT_GE(arbiter.hold_both_ways(Traffic::kGather, kShort), kShort);
  EXPECT_EQ(arbiter.counters().yields, 1);
}

TEST(NicArbiter, GathersYieldToReducesAndReducesToNone) {
  NicArbiter arbiter("", patience(kShort, kForever));
  arbiter.slice_begins();
  EXPECT_EQ(arbiter.hold(Direction::kSend, Traffic::kReduce), 0);
  EXPECT_GT(arbiter.hold(Direction::kSend, Traffic::kGather), 0);  // nobody ends it: patience does
  EXPECT_EQ(arbiter.counters().yields, 1);
  EXPECT_EQ(arbiter.counters().preemptions, 0);
  arbiter.slice_ends();
  EXPECT_EQ(arbiter.hold(Direction::kSend, Traffic::kGather), 0);
}

TEST(NicArbiter, ReducesYieldToGathersWhereTheseGoFirst) {
  NicArbiter::Options options = patience(kShort, kForever);
  options.gathers_first = true;
  NicArbiter arbiter("", options);
  comm::Turn reduce(arbiter, Traffic::kReduce, Direction::kSend, /*uses_card=*/true);
  reduce.take(1);
  EXPECT_EQ(arbiter.hold(Direction::kSend, Traffic::kGather), 0);
  comm::Turn gather(arbiter, Traffic::kGather, Direction::kSend, /*uses_card=*/true);
  gather.take(1);
  EXPECT_EQ(arbiter.hold(Direction::kSend, Traffic::kGather), 0);
  EXPECT_GT(arbiter.hold(Direction::kSend, Traffic::kReduce), 0);  // nobody ends it: patience does
  EXPECT_EQ(arbiter.counters().yields, 1);
  gather.leave();
  EXPECT_EQ(arbiter.hold(Direction::kSend, Traffic::kReduce), 0);
}

TEST(NicArbiter, AGatherFindsNoGapBetweenTheSlicesOfAReduce) {
  NicArbiter arbiter("", kPatient);
  comm::Turn turn(arbiter, Traffic::kReduce, Direction::kSend, /*uses_card=*/true);
  turn.take(64);
  std::atomic<bool> passed{false};
  auto gather = std::async(std::launch::async, [&] {
    arbiter.hold(Direction::kSend, Traffic::kGather);
    passed = true;
  });
  for (int slice = 0; slice < 10'000; ++slice) {
    turn.take(64);
    std::this_thread::yield();
  }
  EXPECT_FALSE(passed);
  turn.leave();
  gather.get();
  turn.leave();  // once more is nothing
  EXPECT_EQ(arbiter.hold(Direction::kSend, Traffic::kGather), 0);
  comm::Turn none(arbiter, Traffic::kGather, Direction::kSend, /*uses_card=*/true);
  none.take(64);
  EXPECT_EQ(arbiter.hold(Direction::kSend, Traffic::kGather), 0);
}

TEST(NicArbiter, PatienceEnds) {
  NicArbiter arbiter("", patience(kShort, kForever));
  const std::int64_t before = comm::now_ns();
  arbiter.message_begins(Direction::kSend, 1);
  const std::int64_t held = arbiter.hold(Direction::kSend, Traffic::kReduce);
  EXPECT_GE(comm::now_ns() - before, kShort);
  EXPECT_GT(held, 0);
  EXPECT_EQ(arbiter.hold(Direction::kSend, Traffic::kReduce), 0);  // the message had its time
  EXPECT_EQ(arbiter.counters().preemptions, 1);
  EXPECT_EQ(arbiter.counters().held_ns, held);
}

TEST(NicArbiter, CountsWhatMessagesWaitForSlicesUnderWay) {
  NicArbiter arbiter("", kPatient);
  constexpr std::int64_t kSlice = 1'000'000'000;
  arbiter.passed(Direction::kSend, 0, kSlice);
  EXPECT_EQ(arbiter.counters().delayed_ns, 0);  // nobody waited
  const std::int64_t before = comm::now_ns();
  arbiter.message_begins(Direction::kSend, 1);
  const std::int64_t after = comm::now_ns();
  arbiter.passed(Direction::kSend, before - kSlice, after + kSlice);  // half of it was over when the message came
  arbiter.passed(Direction::kReceive, before - kSlice, after + kSlice);
  EXPECT_GE(arbiter.counters().delayed_ns, kSlice);
  EXPECT_LE(arbiter.counters().delayed_ns, kSlice + after - before);
  arbiter.passed(Direction::kSend, after, after + kSlice);  // went ahead because patience was over
  EXPECT_GE(arbiter.counters().delayed_ns, 2 * kSlice);
}

TEST(NicArbiter, OnlyWaitsForMessagesArePreemption) {
  NicArbiter arbiter("", patience(kShort, kForever));
  arbiter.slice_begins();
  const std::int64_t yielded = arbiter.hold(Direction::kSend, Traffic::kGather);
  EXPECT_EQ(arbiter.counters().preempted_ns, 0);
  arbiter.message_begins(Direction::kSend, 1);
  const std::int64_t preempted = arbiter.hold(Direction::kSend, Traffic::kReduce);
  EXPECT_EQ(arbiter.counters().preempted_ns, preempted);
  EXPECT_EQ(arbiter.counters().held_ns, yielded + preempted);
}

TEST(NicArbiter, AMessageGetsTwiceTheTimeItTakes) {
  NicArbiter arbiter("", patience(0, 0));
  arbiter.message_begins(Direction::kSend, 1'000);  // at a speed not known yet
  EXPECT_EQ(arbiter.hold(Direction::kSend, Traffic::kReduce), 0);
  arbiter.message_ends(Direction::kSend);
  arbiter.set_bandwidth(100'000);
  const std::int64_t before = comm::now_ns();
  arbiter.message_begins(Direction::kSend, 1'000);  // 10 ms
  arbiter.hold(Direction::kSend, Traffic::kReduce);
  EXPECT_GE(comm::now_ns() - before, 20 * kMillisecond);
  for (const double wrong : {-1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    EXPECT_THROW(arbiter.set_bandwidth(wrong), std::invalid_argument);
  }
}

TEST(NicArbiter, WithoutPreemptionNobodyWaits) {
  NicArbiter::Options options = kPatient;
  options.preempt = false;
  NicArbiter arbiter("", options);
  arbiter.message_begins(Direction::kSend, 1);
  arbiter.slice_begins();
  EXPECT_EQ(arbiter.hold(Direction::kSend, Traffic::kGather), 0);
  EXPECT_EQ(arbiter.counters().messages, 1);
}

TEST(NicArbiter, OpenEndsAHoldForEver) {
  NicArbiter arbiter("", kPatient);
  arbiter.message_begins(Direction::kSend, 1);
  auto slice = std::async(std::launch::async, [&] { arbiter.hold(Direction::kSend, Traffic::kReduce); });
  arbiter.open();
  slice.get();
  arbiter.message_ends(Direction::kSend);  // it was taken back: counts nothing
  arbiter.message_begins(Direction::kSend, 1);
  EXPECT_EQ(arbiter.hold(Direction::kSend, Traffic::kGather), 0);
}

TEST(NicArbiter, ManyThreadsLeaveNobodyWaiting) {
  NicArbiter arbiter("", kPatient);
  constexpr int kRounds = 2'000;
  std::vector<std::thread> threads;
  for (const Direction direction : {Direction::kSend, Direction::kReceive}) {
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&arbiter, direction] {
        for (int k = 0; k < kRounds; ++k) {
          arbiter.message_begins(direction, 64);
          arbiter.set_bandwidth(1e9 + k);
          arbiter.message_ends(direction);
        }
      });
    }
    threads.emplace_back([&arbiter, direction] {
      for (int k = 0; k < kRounds; ++k) arbiter.hold(direction, k % 2 == 0 ? Traffic::kGather : Traffic::kReduce);
    });
  }
  threads.emplace_back([&arbiter] {
    for (int k = 0; k < kRounds; ++k) {
      arbiter.hold(Direction::kSend, Traffic::kReduce);
      arbiter.slice_begins(64);
      arbiter.slice_ends();
    }
  });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(arbiter.hold(Direction::kSend, Traffic::kGather), 0);
  EXPECT_EQ(arbiter.hold(Direction::kReceive, Traffic::kGather), 0);
  EXPECT_EQ(arbiter.counters().messages, 4 * kRounds);
}

/// Whether `hold` returns only after `end` was called.
template <class Hold, class End>
bool waits_for(Hold hold, End end) {
  std::atomic<bool> ended{false};
  auto held = std::async(std::launch::async, [&] {
    hold();
    return ended.load();
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  ended.store(true);
  end();
  return held.get();
}

TEST(NicArbiter, MessagesAndSlicesYieldToTensors) {
  NicArbiter arbiter("", kPatient);
  for (const Direction direction : {Direction::kSend, Direction::kReceive}) {
    const auto end = [&] { arbiter.tensor_ends(direction); };
    arbiter.tensor_begins(direction, 100);
    EXPECT_TRUE(waits_for([&] { arbiter.hold_message(direction); }, end));
    for (const Traffic traffic : {Traffic::kReduce, Traffic::kGather}) {
      arbiter.tensor_begins(direction, 100);
      EXPECT_TRUE(waits_for([&] { arbiter.hold(direction, traffic); }, end));
    }
  }
  EXPECT_EQ(arbiter.counters().message_holds, 2);
  EXPECT_EQ(arbiter.counters().preemptions, 4);
  EXPECT_EQ(arbiter.counters().yields, 0);
}

TEST(NicArbiter, TensorsOfTheOtherDirectionHoldNobody) {
  NicArbiter arbiter("", kPatient);
  arbiter.tensor_begins(Direction::kSend, 100);
  EXPECT_EQ(arbiter.hold_message(Direction::kReceive), 0);
  EXPECT_EQ(arbiter.hold(Direction::kReceive, Traffic::kGather), 0);
  arbiter.tensor_ends(Direction::kSend);
  EXPECT_EQ(arbiter.hold_message(Direction::kSend), 0);
}

TEST(NicArbiter, MessagesYieldToNothingElse) {
  NicArbiter arbiter("", kPatient);
  arbiter.message_begins(Direction::kSend, 100);
  arbiter.slice_begins(100);
  EXPECT_EQ(arbiter.hold_message(Direction::kSend), 0);
}

TEST(NicArbiter, AMessageHasPatienceWithTensorsToo) {
  NicArbiter arbiter("", patience(kMillisecond, kForever));
  arbiter.tensor_begins(Direction::kSend, 100);  // and never ends: its peer does not read
  EXPECT_GE(arbiter.hold_message(Direction::kSend), 0);
  EXPECT_EQ(arbiter.counters().preemptions, 0);
}

TEST(NicArbiter, ATurnOfTensorsLeavesNothingBehind) {
  NicArbiter arbiter("", kPatient);
  {
    comm::Turn turn(arbiter, Traffic::kTensor, Direction::kSend, /*uses_card=*/true);
    turn.take(10);
    turn.take(20);
    turn.leave();
    EXPECT_EQ(arbiter.hold_message(Direction::kSend), 0);
    turn.take(30);
  }
  EXPECT_EQ(arbiter.hold_message(Direction::kSend), 0);
  comm::Turn within_the_host(arbiter, Traffic::kTensor, Direction::kSend, /*uses_card=*/false);
  within_the_host.take(10);
  EXPECT_EQ(arbiter.hold_message(Direction::kSend), 0);
}

}  // namespace
}  // namespace fold3d::test
