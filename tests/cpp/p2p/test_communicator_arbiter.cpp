// What a communicator tells the arbiter about its messages.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "comm/arbiter/nic_arbiter.h"
#include "comm/p2p/communicator.h"
#include "comm/p2p/frame.h"
#include "harness/comm_harness.h"

namespace fold3d::test {
namespace {

using comm::Channel;
using comm::Communicator;
using comm::NicArbiter;
using core::parse_action;
using Direction = NicArbiter::Direction;
using Traffic = NicArbiter::Traffic;

/// A arbiter nobody leaves for lack of patience.
std::shared_ptr<NicArbiter> patient_gate() {
  constexpr std::int64_t kForever = 600'000'000'000;
  return std::make_shared<NicArbiter>(
      "", NicArbiter::Options{.rule = {.message_patience_ns = kForever, .slice_patience_ns = kForever}});
}

/// A chunk held by a message that the test lets go.
class HeldChunk {
 public:
  HeldChunk(NicArbiter& arbiter, Direction direction) {
    through_ = std::async(std::launch::async, [this, &arbiter, direction] {
      arbiter.hold(direction, Traffic::kReduce);
      return may_go_.load();
    });
  }
  void may_go() { may_go_.store(true); }
  /// Whether it went no earlier than it might.
  bool went_in_time() { return through_.get(); }

 private:
  std::atomic<bool> may_go_{false};
  std::future<bool> through_;
};

bool announces(const NicArbiter& arbiter, std::int64_t messages) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (arbiter.counters().messages != messages && std::chrono::steady_clock::now() < deadline)
    std::this_thread::yield();
  return arbiter.counters().messages == messages;
}

TEST(CommunicatorGate, ASendIsPendingFromItsQueueingUntilItIsThrough) {
  comm::Loopback loopback({.pp = 2});
  const auto arbiter = patient_gate();
  Communicator sender(loopback.connect(0), options_for(2, 0), arbiter);
  const auto peer = loopback.connect(1);
  sender.begin(program({"0SEND_F0", "0SEND_F1"}));
  sender.send(parse_action("0SEND_F0"), {make_tensor({1})});
  sender.send(parse_action("0SEND_F1"), {make_tensor({1, 2})});
  EXPECT_EQ(arbiter->hold(Direction::kReceive, Traffic::kGather), 0);
  HeldChunk chunk(*arbiter, Direction::kSend);
  std::vector<std::byte> frame(comm::kFrameBytes);
  peer->recv_frame(Channel::kForward, 0, frame);
  chunk.may_go();
  peer->recv_frame(Channel::kForward, 0, frame);
  EXPECT_TRUE(chunk.went_in_time());
  sender.finish();
  EXPECT_EQ(arbiter->counters().messages, 2);
  EXPECT_EQ(arbiter->counters().message_bytes, 24);
}

TEST(CommunicatorGate, AReceiveIsPendingFromItsFrameUntilItsPayload) {
  comm::Loopback loopback({.pp = 2});
  const auto arbiter = patient_gate();
  Communicator receiver(loopback.connect(1), options_for(2, 1), arbiter);
  const auto peer = loopback.connect(0);
  receiver.begin(program({"1RECV_F0", "1RECV_F1"}));
  peer->send_frame(Channel::kForward, 1, frame_of("0SEND_F0", 1, {make_tensor({1})}));
  receiver.wait(parse_action("1RECV_F0"));
  EXPECT_EQ(arbiter->counters().messages, 0);  // all of it was in the frame
  const comm::Tensor large = make_tensor(std::vector<std::int64_t>(1000));
  peer->send_frame(Channel::kForward, 1, frame_of("0SEND_F1", 1, {large}));
  ASSERT_TRUE(announces(*arbiter, 1));
  EXPECT_EQ(arbiter->hold(Direction::kSend, Traffic::kGather), 0);
  HeldChunk chunk(*arbiter, Direction::kReceive);
  chunk.may_go();
  peer->send(Channel::kForward, 1, large.buffer);
  EXPECT_TRUE(chunk.went_in_time());
  receiver.wait(parse_action("1RECV_F1"));
  receiver.finish();
  EXPECT_EQ(arbiter->counters().message_bytes, 8000);
}

TEST(CommunicatorGate, HearsNothingOfMessagesWithinTheHost) {  // they take nothing of its card
  comm::Loopback loopback({.pp = 2});
  const auto arbiter = patient_gate();
  comm::Options options = options_for(2, 1);
  options.hosts = {7, 7};
  Communicator communicator(loopback.connect(1), options, arbiter);
  const auto peer = loopback.connect(0);
  communicator.begin(program({"1RECV_F0", "1SEND_B0"}));
  const comm::Tensor large = make_tensor(std::vector<std::int64_t>(1000));
  communicator.send(parse_action("1SEND_B0"), {large});  // which nobody receives yet
  EXPECT_EQ(arbiter->hold(Direction::kSend, Traffic::kGather), 0);
  peer->send_frame(Channel::kForward, 1, frame_of("0SEND_F0", 1, {large}));
  EXPECT_EQ(arbiter->hold(Direction::kReceive, Traffic::kGather), 0);
  peer->send(Channel::kForward, 1, large.buffer);
  communicator.wait(parse_action("1RECV_F0"));
  std::vector<std::byte> frame(comm::kFrameBytes);
  peer->recv_frame(Channel::kBackward, 1, frame);
  peer->recv(Channel::kBackward, 1, make_tensor(std::vector<std::int64_t>(1000)).buffer);
  communicator.finish();
  EXPECT_EQ(arbiter->counters().messages, 0);
}

TEST(CommunicatorGate, TellsHostsApartByTheirStages) {  // stages 0 and 1 on one host, 2 on another
  const auto arbiter = patient_gate();
  comm::Loopback loopback({.pp = 3});
  comm::Options options = options_for(3, 1);
  options.hosts = {4, 4, 9};
  Communicator middle(loopback.connect(1), options, arbiter);
  const auto before = loopback.connect(0), after = loopback.connect(2);
  middle.begin(program({"1SEND_F0", "1SEND_B0"}));
  middle.send(parse_action("1SEND_F0"), {make_tensor({1})});
  middle.send(parse_action("1SEND_B0"), {make_tensor({1})});
  std::vector<std::byte> frame(comm::kFrameBytes);
  before->recv_frame(Channel::kBackward, 1, frame);
  after->recv_frame(Channel::kForward, 1, frame);
  middle.finish();
  EXPECT_EQ(arbiter->counters().messages, 1);
  options.hosts = {4, 4};
  EXPECT_THROW(Communicator(loopback.connect(1), options, arbiter), std::invalid_argument);
}

TEST(CommunicatorGate, AFailureOpensIt) {
  comm::Loopback loopback({.pp = 2});
  const auto arbiter = patient_gate();
  Communicator communicator(loopback.connect(0), options_for(2, 0), arbiter);
  communicator.begin(program({"0SEND_F0"}));
  communicator.send(parse_action("0SEND_F0"), {make_tensor({1})});  // which nobody receives
  HeldChunk chunk(*arbiter, Direction::kSend);
  chunk.may_go();
  communicator.abort("enough");
  EXPECT_TRUE(chunk.went_in_time());
}

TEST(CommunicatorGate, ReductionsInTheProgramAreNotItsBusiness) {
  comm::Loopback loopback({.pp = 2});
  Communicator communicator(loopback.connect(0), options_for(2, 0));
  communicator.begin(program({"0F0", "0B0", "0REDUCE_GRAD"}));
  EXPECT_THROW(communicator.send(parse_action("0REDUCE_GRAD"), {}), std::logic_error);
  communicator.finish();
}

}  // namespace
}  // namespace fold3d::test
