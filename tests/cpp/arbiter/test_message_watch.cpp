// Messages that a device sends by itself, as the arbiter hears of them: by progress, not by launch.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "comm/arbiter/message_watch.h"
#include "comm/arbiter/nic_arbiter.h"
#include "comm/base/clock.h"
#include "core/network/slice_rule.h"

namespace fold3d::test {
namespace {

using namespace std::chrono_literals;
using comm::MessageWatch;
using comm::NicArbiter;
using core::SliceRule;
using Direction = NicArbiter::Direction;
using Traffic = NicArbiter::Traffic;

constexpr std::int64_t kForever = 600'000'000'000;
constexpr std::int64_t kMillisecond = 1'000'000;

std::shared_ptr<NicArbiter> patient_arbiter() {
  return std::make_shared<NicArbiter>(
      "", NicArbiter::Options{.rule = {.message_patience_ns = kForever, .slice_patience_ns = kForever}});
}

/// A message on its way over a device, whose progress the test decides.
struct Message {
  std::atomic<bool> ready{false}, through{false}, asked_ready{false}, asked_through{false};

  MessageWatch::Transit transit(std::size_t bytes = 8) {
    return {.bytes = bytes,
            .is_ready =
                [this] {
                  asked_ready = true;
                  return ready.load();
                },
            .is_through =
                [this] {
                  asked_through = true;
                  return through.load();
                }};
  }
};

void wait_for(const std::atomic<bool>& flag) {
  for (int look = 0; look < 60'000 && !flag; ++look) std::this_thread::sleep_for(1ms);
  ASSERT_TRUE(flag);
}

void wait_for_messages(const NicArbiter& arbiter, std::int64_t count) {
  for (int look = 0; look < 60'000 && arbiter.counters().messages < count; ++look) std::this_thread::sleep_for(1ms);
  ASSERT_EQ(arbiter.counters().messages, count);
}

std::future<void> slice_of(NicArbiter& arbiter, std::atomic<bool>& passed) {
  return std::async(std::launch::async, [&] {
    arbiter.hold(Direction::kSend, Traffic::kReduce);
    passed = true;
  });
}

TEST(MessageWatch, ALaunchedMessageHoldsNothingBackBeforeItsDataIsReady) {
  const auto arbiter = patient_arbiter();
  Message message;  // outlives the watch
  MessageWatch watch(arbiter);
  watch.push(0, message.transit(100));
  wait_for(message.asked_ready);
  EXPECT_EQ(arbiter->hold(Direction::kSend, Traffic::kReduce), 0);
  EXPECT_EQ(arbiter->counters().messages, 0);
  message.ready = true;
  wait_for_messages(*arbiter, 1);
  EXPECT_EQ(arbiter->counters().message_bytes, 100);
  std::atomic<bool> passed{false};
  auto slice = slice_of(*arbiter, passed);
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(passed);  // on its way
  message.through = true;
  slice.get();
  EXPECT_EQ(arbiter->counters().preemptions, 1);
  EXPECT_EQ(arbiter->hold(Direction::kReceive, Traffic::kGather), 0);
}

TEST(MessageWatch, NoSliceSlipsBetweenMessagesThatFollowEachOther) {
  const auto arbiter = patient_arbiter();
  std::vector<Message> messages(200);
  MessageWatch watch(arbiter);
  for (Message& message : messages) {
    message.ready = true;
    watch.push(0, message.transit());
  }
  wait_for_messages(*arbiter, 1);
  std::atomic<bool> passed{false};
  auto slice = slice_of(*arbiter, passed);
  for (std::size_t k = 0; k + 1 < messages.size(); ++k) {
    messages[k].through = true;
    wait_for_messages(*arbiter, static_cast<std::int64_t>(k) + 2);
    EXPECT_FALSE(passed);
  }
  messages.back().through = true;
  slice.get();
}

TEST(MessageWatch, ALineThatWaitsHoldsUpNoOther) {
  const auto arbiter = patient_arbiter();
  Message late, early;
  MessageWatch watch(arbiter);
  watch.push(0, late.transit());
  early.ready = true;
  watch.push(1, early.transit());
  wait_for_messages(*arbiter, 1);
  early.through = true;
  std::atomic<bool> passed{false};
  slice_of(*arbiter, passed).get();  // only the late one is left, and it is not ready
  EXPECT_TRUE(late.asked_ready);
  EXPECT_FALSE(late.asked_through);
  EXPECT_THROW(watch.push(MessageWatch::kLines, late.transit()), std::out_of_range);
}

TEST(MessageWatch, AMessageThatArrivesHoldsBackWhatIsReceived) {
  const auto arbiter = patient_arbiter();
  Message message;
  MessageWatch watch(arbiter);
  MessageWatch::Transit transit = message.transit(100);
  transit.direction = Direction::kReceive;
  watch.push(2, std::move(transit));
  wait_for(message.asked_ready);
  EXPECT_EQ(arbiter->hold_both_ways(Traffic::kReduce), 0);  // it was not sent yet
  message.ready = true;
  wait_for_messages(*arbiter, 1);
  EXPECT_EQ(arbiter->hold(Direction::kSend, Traffic::kReduce), 0);
  std::atomic<bool> passed{false};
  auto slice = std::async(std::launch::async, [&] {
    arbiter->hold_both_ways(Traffic::kReduce);
    passed = true;
  });
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(passed);
  message.through = true;
  slice.get();
}

TEST(MessageWatch, ItSaysOnceThatAMessageIsReady) {
  const auto arbiter = patient_arbiter();
  std::vector<Message> messages(3);
  std::atomic<int> said{0};
  MessageWatch watch(arbiter);
  for (Message& message : messages) {
    MessageWatch::Transit transit = message.transit();
    transit.when_ready = [&said] { ++said; };
    watch.push(0, std::move(transit));
  }
  wait_for(messages[0].asked_ready);
  EXPECT_EQ(said, 0);
  for (int k = 0; k < 3; ++k) {
    messages[static_cast<std::size_t>(k)].ready = true;
    wait_for_messages(*arbiter, k + 1);
    messages[static_cast<std::size_t>(k)].through = true;
  }
  Message last;
  last.ready = last.through = true;
  watch.push(0, last.transit());
  wait_for(last.asked_through);  // all of the line before it are over
  EXPECT_EQ(said, 3);
}

TEST(MessageWatch, WhatIsPendingEndsWithIt) {
  const auto arbiter = patient_arbiter();
  Message message;
  message.ready = true;
  auto watch = std::make_unique<MessageWatch>(arbiter);
  watch->push(1, message.transit());
  wait_for_messages(*arbiter, 1);
  std::atomic<bool> passed{false};
  auto slice = slice_of(*arbiter, passed);
  watch.reset();
  slice.get();
  EXPECT_EQ(arbiter->hold(Direction::kSend, Traffic::kReduce), 0);
}

TEST(MessageWatch, ADeviceThatFailedHoldsNothingBack) {
  const auto arbiter = patient_arbiter();
  std::atomic<bool> asked{false};
  Message after;
  after.ready = after.through = true;
  MessageWatch watch(arbiter);
  watch.push(0, {.bytes = 1,
                 .is_ready = [] { return true; },
                 .is_through = [&asked]() -> bool {
                   asked = true;
                   throw std::runtime_error("an illegal memory access was encountered");
                 }});
  watch.push(0, after.transit());
  wait_for(after.asked_through);
  std::atomic<bool> passed{false};
  slice_of(*arbiter, passed).get();
  EXPECT_TRUE(asked);
}

TEST(SliceRule, SlicesOfReplicasInAStreamOfMessagesThatNeverEnds) {
  // Three replicas, each on a host of its own whose card always has a message on its way; a slice moves when the last
  // of them lets it go, whichever that is. At most the longest hold passes for each, not the sum.
  constexpr int kReplicas = 3, kSlices = 10;
  constexpr double kSpeed = 1e9;
  constexpr std::int64_t kBytes = 2'000'000;  // 2 ms alone
  const std::int64_t longest_ns = SliceRule::longest_hold_ns(kBytes, kSpeed);
  EXPECT_EQ(longest_ns, 8 * kMillisecond);
  std::vector<std::shared_ptr<NicArbiter>> arbiters;
  Message endless;
  endless.ready = true;
  std::vector<std::unique_ptr<MessageWatch>> watches;
  for (int replica = 0; replica < kReplicas; ++replica) {
    arbiters.push_back(patient_arbiter());
    watches.push_back(std::make_unique<MessageWatch>(arbiters.back()));
    watches.back()->push(0, endless.transit());
    wait_for_messages(*arbiters.back(), 1);
  }
  for (int slice = 0; slice < kSlices; ++slice) {
    std::vector<std::future<std::int64_t>> held;
    for (const auto& arbiter : arbiters) {
      held.push_back(std::async(std::launch::async, [&arbiter, longest_ns] {
        return arbiter->hold(Direction::kSend, Traffic::kReduce, longest_ns);
      }));
    }
    for (auto& one : held) EXPECT_GE(one.get(), longest_ns);
  }
  for (const auto& arbiter : arbiters) {
    EXPECT_EQ(arbiter->counters().preemptions, kSlices);
    EXPECT_LT(arbiter->counters().held_ns,
              kSlices * longest_ns + 2'000 * kMillisecond);  // of which the most is this machine's
  }
}

}  // namespace
}  // namespace fold3d::test
