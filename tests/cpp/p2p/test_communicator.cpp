// The communicator's promises one by one, against a peer that is another communicator or a bare transport.
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "comm/base/errors.h"
#include "comm/p2p/communicator.h"
#include "comm/p2p/frame.h"
#include "harness/comm_harness.h"

namespace fold3d::test {
namespace {

using namespace std::chrono_literals;
using comm::Channel;
using comm::Communicator;
using core::Action;
using core::parse_action;
using Program = std::vector<Action>;

/// Forwards to another transport and tells about the calls.
class ProbeTransport final : public comm::Transport {
 public:
  struct Hooks {
    std::function<void()> before_recv_frame = [] {};
    std::function<void()> before_abort = [] {};
  };

  ProbeTransport(std::unique_ptr<comm::Transport> inner, Hooks hooks)
      : inner_(std::move(inner)), hooks_(std::move(hooks)) {}

  void send(Channel channel, int peer, std::shared_ptr<comm::Buffer> buffer) override {
    inner_->send(channel, peer, buffer);
  }
  void recv(Channel channel, int peer, std::shared_ptr<comm::Buffer> buffer) override {
    inner_->recv(channel, peer, buffer);
  }
  void send_frame(Channel channel, int peer, std::span<const std::byte> frame) override {
    inner_->send_frame(channel, peer, frame);
  }
  void recv_frame(Channel channel, int peer, std::span<std::byte> frame) override {
    hooks_.before_recv_frame();
    inner_->recv_frame(channel, peer, frame);
  }
  void abort(const std::string& reason) override {
    hooks_.before_abort();
    inner_->abort(reason);
  }

 private:
  std::unique_ptr<comm::Transport> inner_;
  Hooks hooks_;
};

/// The text of the `Error` that `call` throws; fails the test if it throws none.
template <class Error, class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

void expect_mentions(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
}

/// A communicator as stage 1 of 2 and a bare transport as stage 0.
struct BarePeer {
  comm::Loopback loopback{{.pp = 2}};
  std::unique_ptr<comm::Transport> peer = loopback.connect(0);
  Communicator communicator{loopback.connect(1), options_for(2, 1)};

  /// What wait() of stage 1 says when stage 0 sends this frame.
  std::string refusal(const std::vector<std::byte>& frame) {
    communicator.begin(program({"1RECV_F0"}));
    auto sender = std::async(std::launch::async, [&] { peer->send_frame(Channel::kForward, 1, frame); });
    const std::string text = error_of<comm::ProtocolError>([&] { communicator.wait(parse_action("1RECV_F0")); });
    sender.get();
    expect_mentions(text, {"stage 1: 1RECV_F0 from stage 0 failed"});
    EXPECT_EQ(error_of<comm::ProtocolError>([&] { communicator.finish(); }), text);  // the first error stays
    return text;
  }
};

TEST(Headers, WrongMicroBatchIsAnError) {
  expect_mentions(BarePeer().refusal(frame_of("0SEND_F1", 1, {})), {"0SEND_F0", "0SEND_F1"});
}

TEST(Headers, WrongKindIsAnError) {
  expect_mentions(BarePeer().refusal(frame_of("0SEND_B0", 1, {})), {"0SEND_F0", "0SEND_B0"});
}

TEST(Headers, WrongStepIsAnError) {
  expect_mentions(BarePeer().refusal(frame_of("0SEND_F0", 2, {})), {"of step 1", "of step 2"});
}

TEST(Headers, ForeignBytesAreAnError) {
  auto frame = frame_of("0SEND_F0", 1, {});
  frame[0] ^= std::byte{1};
  expect_mentions(BarePeer().refusal(frame), {"bad magic"});
}

TEST(Headers, PayloadOfAnotherSizeIsAnError) {
  BarePeer pair;
  pair.communicator.begin(program({"1RECV_F0"}));
  auto sender = std::async(std::launch::async, [&] {
    pair.peer->send_frame(Channel::kForward, 1, frame_of("0SEND_F0", 1, {make_tensor(std::vector<std::int64_t>(300))}));
    EXPECT_THROW(pair.peer->send(Channel::kForward, 1, make_tensor({1}).buffer), comm::CommError);
  });
  const std::string text = error_of<comm::ProtocolError>([&] { pair.communicator.wait(parse_action("1RECV_F0")); });
  sender.get();
  expect_mentions(text, {"stage 1", "1RECV_F0", "2400 bytes", "8 bytes"});
}

TEST(Senders, ABufferOfAnotherSizeIsTheirError) {
  comm::Loopback loopback({.pp = 2});
  Communicator communicator(loopback.connect(0), options_for(2, 0));
  communicator.begin(program({"0SEND_F0"}));
  comm::Tensor tensor = make_tensor({1, 2});
  tensor.desc.shape = {5};
  communicator.send(parse_action("0SEND_F0"), {tensor});
  expect_mentions(error_of<comm::CommError>([&] { communicator.finish(); }),
                  {"stage 0: 0SEND_F0 to stage 1", "16", "40"});
}

TEST(Waits, TimeoutNamesWhatAndHowLongAndTheSetting) {
  comm::Loopback loopback({.pp = 2});
  Communicator communicator(loopback.connect(1), options_for(2, 1, 20ms));
  communicator.begin(program({"1RECV_F0"}));
  const std::string text = error_of<comm::TimeoutError>([&] { communicator.wait(parse_action("1RECV_F0")); });
  expect_mentions(text, {"stage 1 waited 0.020 s", "1RECV_F0 from stage 0", "comm_timeout"});
  EXPECT_EQ(error_of<comm::TimeoutError>([&] { communicator.begin({}); }), text);
}

TEST(Waits, LookMeanwhileWhetherTheyAreWantedElsewhere) {  // as by Ctrl-C
  struct Interrupted {};
  comm::Loopback loopback({.pp = 2});
  comm::Options options = options_for(2, 1);
  int looks = 0;
  options.while_waiting = [&looks] {
    if (++looks == 3) throw Interrupted();
  };
  Communicator receiver(loopback.connect(1), options);
  receiver.begin(program({"1RECV_F0", "1SEND_B0"}));
  EXPECT_THROW(receiver.wait(parse_action("1RECV_F0")), Interrupted);
  EXPECT_EQ(looks, 3);
}

TEST(Waits, FinishTimesOutWhenNobodyReceives) {
  comm::Loopback loopback({.pp = 2});
  Communicator communicator(loopback.connect(0), options_for(2, 0, 20ms));
  communicator.begin(program({"0SEND_F0"}));
  communicator.send(parse_action("0SEND_F0"), {make_tensor({1})});
  expect_mentions(error_of<comm::TimeoutError>([&] { communicator.finish(); }),
                  {"0SEND_F0 to stage 1", "comm_timeout"});
}

TEST(Abort, EndsABlockedWaitFromAnotherThreadAndTheFirstReasonStays) {
  for (const char* const what : {"recv", "send"}) {
    comm::Loopback fresh({.pp = 2});
    Communicator communicator(fresh.connect(1), options_for(2, 1));
    communicator.begin(program({"1RECV_F0", "1SEND_B0"}));
    communicator.send(parse_action("1SEND_B0"), {make_tensor({1})});
    auto aborter = std::async(std::launch::async, [&] { communicator.abort("the user has had enough"); });
    const auto wait = [&] {
      if (std::string(what) == "recv") communicator.wait(parse_action("1RECV_F0"));
      if (std::string(what) == "send") communicator.begin({});
    };
    if (std::string(what) == "send") aborter.wait();
    EXPECT_EQ(error_of<comm::AbortedError>(wait), "the user has had enough") << what;
    aborter.get();
    communicator.abort("another reason");
    EXPECT_EQ(error_of<comm::AbortedError>([&] { communicator.finish(); }), "the user has had enough") << what;
  }
}

TEST(Abort, AWaitEndsEvenWhileTheTransportTakesItsTime) {
  std::promise<void> wait_ended;
  ProbeTransport::Hooks hooks;
  hooks.before_abort = [&] { wait_ended.get_future().wait(); };
  comm::Loopback loopback({.pp = 2});
  Communicator communicator(std::make_unique<ProbeTransport>(loopback.connect(1), hooks), options_for(2, 1));
  communicator.begin(program({"1RECV_F0"}));
  auto aborter = std::async(std::launch::async, [&] { communicator.abort("enough"); });
  EXPECT_EQ(error_of<comm::AbortedError>([&] { communicator.wait(parse_action("1RECV_F0")); }), "enough");
  wait_ended.set_value();
  aborter.get();
}

TEST(Abort, DestructionInTheMiddleOfAStepEndsAndTellsThePeer) {
  comm::Loopback loopback({.pp = 2});
  auto first = std::make_unique<Communicator>(loopback.connect(0), options_for(2, 0));
  Communicator second(loopback.connect(1), options_for(2, 1));
  first->begin(program({"0SEND_F0", "0RECV_B0"}));
  second.begin(program({"1RECV_F0", "1SEND_B0"}));
  first.reset();
  expect_mentions(error_of<comm::CommError>([&] { second.wait(parse_action("1RECV_F0")); }),
                  {"stage 1: 1RECV_F0 from stage 0", "in the middle of a step"});
}

TEST(Bounds, ReceivesStayWithinReceiveAheadOfTheProgramCounter) {
  constexpr int kMessages = 12;
  constexpr int kAhead = 3;
  std::mutex mutex;
  std::condition_variable changed;
  int started = 0;
  int passed = 0;
  bool too_many = false;
  ProbeTransport::Hooks hooks;
  hooks.before_recv_frame = [&] {
    const std::lock_guard lock(mutex);
    too_many = too_many || ++started > passed + kAhead;
    changed.notify_all();
  };
  comm::Loopback loopback({.pp = 2});
  Communicator sender(loopback.connect(0), options_for(2, 0));
  auto options = options_for(2, 1);
  options.receive_ahead = kAhead;
  Communicator receiver(std::make_unique<ProbeTransport>(loopback.connect(1), hooks), options);
  Program sends, receives;
  for (int i = 0; i < kMessages; ++i) {
    sends.push_back({.chunk = 0, .kind = core::Kind::kSendForward, .micro_batch = i});
    receives.push_back({.chunk = 1, .kind = core::Kind::kRecvForward, .micro_batch = i});
  }
  sender.begin(sends);
  for (const Action& action : sends) sender.send(action, {make_tensor({action.micro_batch})});
  receiver.begin(receives);
  for (int i = 0; i < kMessages; ++i) {
    std::unique_lock lock(mutex);
    const int reachable = std::min(i + kAhead, kMessages);
    ASSERT_TRUE(changed.wait_for(lock, 30s, [&] { return started == reachable; })) << started << " of " << reachable;
    ++passed;
    lock.unlock();
    receiver.pass(receives[static_cast<std::size_t>(i)]);
  }
  for (const Action& action : receives) {
    EXPECT_EQ(values_of(receiver.wait(action).at(0)), std::vector<std::int64_t>{action.micro_batch});
  }
  receiver.finish();
  sender.finish();
  EXPECT_FALSE(too_many);
}

TEST(Records, EveryTransferOnceInOrderWithItsBytes) {
  comm::Loopback loopback({.pp = 2});
  Communicator first(loopback.connect(0), options_for(2, 0));
  Communicator second(loopback.connect(1), options_for(2, 1));
  first.begin(program({"0SEND_F0", "0SEND_F1", "0RECV_B0", "0REDUCE_GRAD"}));
  second.begin(program({"1RECV_F0", "1RECV_F1", "1SEND_B0"}));
  first.send(parse_action("0SEND_F0"), {make_tensor({1}), make_tensor({2})});
  first.send(parse_action("0SEND_F1"), {make_tensor(std::vector<std::int64_t>(1000))});
  second.send(parse_action("1SEND_B0"), {});
  first.wait(parse_action("0RECV_B0"));
  first.finish();
  second.wait(parse_action("1RECV_F0"));
  second.wait(parse_action("1RECV_F1"));
  second.finish();
  const auto summary = [](Communicator& communicator) {
    std::vector<std::string> lines;
    for (const comm::Record& record : communicator.take_records()) {
      EXPECT_GT(record.start_ns, 0);
      EXPECT_LE(record.start_ns, record.end_ns);
      lines.push_back(std::string(to_string(record.queue)) + " " + core::to_string(record.action) + " " +
                      std::to_string(record.bytes));
    }
    return lines;
  };
  EXPECT_EQ(summary(first),
            (std::vector<std::string>{"send_f 0SEND_F0 16", "send_f 0SEND_F1 8000", "recv_b 0RECV_B0 0"}));
  EXPECT_EQ(summary(second),
            (std::vector<std::string>{"recv_f 1RECV_F0 16", "recv_f 1RECV_F1 8000", "send_b 1SEND_B0 0"}));
  EXPECT_TRUE(first.take_records().empty());
}

TEST(Misuse, CallsThatContradictTheProgramAreLogicErrorsAndChangeNothing) {
  comm::Loopback loopback({.pp = 2});
  Communicator communicator(loopback.connect(0), options_for(2, 0));
  const auto peer = loopback.connect(1);
  EXPECT_THROW(communicator.finish(), std::logic_error);
  EXPECT_THROW(communicator.pass(parse_action("0RECV_B0")), std::logic_error);
  communicator.begin(program({"0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0REDUCE_GRAD"}));
  EXPECT_THROW(communicator.begin({}), std::logic_error);
  expect_mentions(error_of<std::logic_error>([&] { communicator.send(parse_action("0SEND_F1"), {}); }),
                  {"0SEND_F1 is out of order", "0SEND_F0"});
  EXPECT_THROW(communicator.send(parse_action("0SEND_F7"), {}), std::logic_error);
  EXPECT_THROW(communicator.send(parse_action("9SEND_F0"), {}), std::logic_error);
  EXPECT_THROW(communicator.wait(parse_action("0RECV_B1")), std::logic_error);
  EXPECT_THROW(communicator.send(parse_action("0REDUCE_GRAD"), {}), std::logic_error);
  expect_mentions(error_of<std::logic_error>([&] { communicator.finish(); }), {"0SEND_F0 was never done"});
  // ... and the step still works.
  std::vector<std::byte> frame(comm::kFrameBytes);
  communicator.send(parse_action("0SEND_F0"), {});
  communicator.send(parse_action("0SEND_F1"), {});
  EXPECT_THROW(communicator.send(parse_action("0SEND_F1"), {}), std::logic_error);
  peer->recv_frame(Channel::kForward, 0, frame);
  EXPECT_EQ(comm::read_frame(frame).send, parse_action("0SEND_F0"));
  peer->recv_frame(Channel::kForward, 0, frame);
  EXPECT_EQ(comm::read_frame(frame).send, parse_action("0SEND_F1"));
  peer->send_frame(Channel::kBackward, 0, frame_of("1SEND_B0", 1, {make_tensor({5})}));
  EXPECT_EQ(values_of(communicator.wait(parse_action("0RECV_B0")).at(0)), std::vector<std::int64_t>{5});
  EXPECT_THROW(communicator.wait(parse_action("0RECV_B0")), std::logic_error);
  communicator.finish();
}

TEST(Misuse, ProgramsAndOptionsAreChecked) {
  comm::Loopback loopback({.pp = 2});
  Communicator communicator(loopback.connect(0), options_for(2, 0));
  const std::map<std::string, std::string> bad{
      {"1SEND_B0", "belongs to stage 1"}, {"2SEND_F0", "there are 2 chunks"}, {"0RECV_F0", "no chunk -1"}};
  for (const auto& [action, why] : bad) {
    expect_mentions(error_of<std::invalid_argument>([&] { communicator.begin(program({action})); }), {action, why});
  }
  expect_mentions(error_of<std::invalid_argument>([&] { communicator.begin(program({"0SEND_F0", "0SEND_F0"})); }),
                  {"0SEND_F0 occurs twice"});
  communicator.begin({});  // none of that did harm
  communicator.finish();
  for (auto spoil : std::vector<std::function<void(comm::Options&)>>{
           [](auto& o) { o.stage = 2; }, [](auto& o) { o.timeout = 0s; }, [](auto& o) { o.receive_ahead = -1; },
           [](auto& o) { o.shape.pp = 0; }}) {
    comm::Options options = options_for(2, 0);
    spoil(options);
    EXPECT_THROW(Communicator(loopback.connect(1), options), std::invalid_argument);
  }
}

TEST(Steps, AMessageOfAStepThatIsLeftArrivesInTheNext) {
  comm::Loopback loopback({.pp = 2});
  Communicator first(loopback.connect(0), options_for(2, 0)), last(loopback.connect(1), options_for(2, 1));
  last.begin(program({"1SEND_B0"}));
  last.send(parse_action("1SEND_B0"), {make_tensor(std::vector<std::int64_t>(1000, 7))});
  last.finish(/*is_left=*/true);  // although nobody receives yet
  first.begin({});
  first.finish(/*is_left=*/true);
  EXPECT_THROW(first.begin({}), std::logic_error);  // a step that was left has to be gone on with
  first.begin(program({"0RECV_B0"}), /*goes_on=*/true);
  EXPECT_EQ(values_of(first.wait(parse_action("0RECV_B0")).front()), std::vector<std::int64_t>(1000, 7));
  last.begin({}, /*goes_on=*/true);
  first.finish();
  last.finish();
  EXPECT_THROW(last.begin({}, /*goes_on=*/true), std::logic_error);
}

}  // namespace
}  // namespace fold3d::test
