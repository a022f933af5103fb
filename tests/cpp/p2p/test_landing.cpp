// Messages that land beside the device's memory: however many, however early; failures end the wait for room.
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/base/errors.h"
#include "comm/p2p/communicator.h"
#include "comm/p2p/landing.h"
#include "harness/comm_harness.h"

namespace fold3d::test {
namespace {

using namespace std::chrono_literals;
using comm::Communicator;
using core::Action;
using core::Kind;

/// Host memory with room for so many messages at once; counts them.
class CountedLanding final : public comm::Landing {
 public:
  explicit CountedLanding(int room) : room_(room) {}

  comm::Tensors take(const Action&, const std::vector<comm::TensorDesc>& descs) override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return taken_ < room_ || !aborted_.empty(); });
    if (!aborted_.empty()) throw comm::AbortedError(aborted_);
    ++taken_;
    comm::Tensors tensors;
    for (const comm::TensorDesc& desc : descs) {
      tensors.push_back({desc, std::make_shared<comm::HostBuffer>(desc.bytes())});
    }
    return tensors;
  }
  void filled(const Action&, const comm::Tensors&) override {
    const std::lock_guard lock(mutex_);
    ++filled_;
    changed_.notify_all();
  }
  void due(const Action&) override {
    const std::lock_guard lock(mutex_);
    ++due_;
  }
  void abort(const std::string& reason) noexcept override {
    const std::lock_guard lock(mutex_);
    aborted_ = reason;
    changed_.notify_all();
  }

  bool wait_for_filled(int count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, 30s, [&] { return filled_ == count; });
  }
  int due_count() {
    const std::lock_guard lock(mutex_);
    return due_;
  }

 private:
  const int room_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int taken_ = 0, filled_ = 0, due_ = 0;
  std::string aborted_;
};

constexpr int kMessages = 20;

/// What stage 1 sends to stage 0 for the next segment, all of it before any is used.
struct Border {
  explicit Border(int room) : landing(std::make_shared<CountedLanding>(room)) {
    for (int i = 0; i < kMessages; ++i) sends.push_back({1, Kind::kSendForward, i});
    for (int i = 0; i < kMessages; ++i) receives.push_back({2, Kind::kRecvForward, i});
    for (int i = 0; i < kMessages; ++i) receives.push_back({2, Kind::kPrefetchForward, i});
    sender = std::make_unique<Communicator>(loopback.connect(1), options(1));
    receiver = std::make_unique<Communicator>(loopback.connect(0), options(0), nullptr,
                                              std::make_unique<comm::HostAllocator>(), landing);
    sender->begin(sends);
    receiver->begin(receives);
    for (const Action& send : sends) {
      sender->send(send, {make_tensor(std::vector<std::int64_t>(1000, send.micro_batch))});
    }
  }

  static comm::Options options(int stage) {
    comm::Options made = options_for(2, stage);
    made.shape = {2, 2, 1};
    return made;
  }

  comm::Loopback loopback{{.pp = 2}};
  std::vector<Action> sends, receives;
  std::shared_ptr<CountedLanding> landing;
  std::unique_ptr<Communicator> sender, receiver;
};

/// A message that has been taken up is announced by another thread a moment later.
bool arrives(Communicator& receiver, const Action& recv) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!receiver.has_arrived(recv) && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  return receiver.has_arrived(recv);
}

TEST(Landing, NoSenderWaitsForTheReceiversProgram) {
  Border border(kMessages);
  EXPECT_TRUE(border.landing->wait_for_filled(kMessages));  // more than receive_ahead, and the program has not begun
  border.sender->finish();
  EXPECT_EQ(border.landing->due_count(), 0);
  for (int i = 0; i < kMessages; ++i) {
    const Action recv{2, Kind::kRecvForward, i};
    border.receiver->pass(recv);
    EXPECT_GE(border.landing->due_count(), i + 1);
    EXPECT_TRUE(arrives(*border.receiver, recv));
    EXPECT_EQ(values_of(border.receiver->wait(recv).at(0)), std::vector<std::int64_t>(1000, i));
  }
  border.receiver->finish();
}

TEST(Landing, AMessageThatHasNotArrivedIsNotWaitedForByAsking) {
  Border border(3);
  EXPECT_TRUE(border.landing->wait_for_filled(3));
  EXPECT_FALSE(border.receiver->has_arrived({2, Kind::kRecvForward, 3}));
}

TEST(Landing, AFailureEndsTheWaitForRoom) {
  Border border(3);
  EXPECT_TRUE(border.landing->wait_for_filled(3));
  border.receiver->abort("the pool is full");
  EXPECT_THROW(border.receiver->wait({2, Kind::kRecvForward, 3}), comm::CommError);
  border.sender->abort("the other rank is gone");
}

TEST(Landing, AProgramThatNeedsOneIsRefusedWithoutIt) {
  comm::Loopback loopback({.pp = 2});
  Communicator receiver(loopback.connect(0), Border::options(0));
  EXPECT_THROW(receiver.begin({{2, Kind::kRecvForward, 0}, {2, Kind::kPrefetchForward, 0}}), std::logic_error);
}

TEST(Landing, MessagesForTheDeviceStayBoundedBetweenThoseThatLand) {
  // One of four goes to the device: the queue may run as far as receive_ahead of those.
  comm::Loopback loopback({.pp = 2});
  auto landing = std::make_shared<CountedLanding>(100);
  comm::Options options = Border::options(0);
  options.receive_ahead = 2;
  Communicator sender(loopback.connect(1), Border::options(1));
  Communicator receiver(loopback.connect(0), options, nullptr, std::make_unique<comm::HostAllocator>(), landing);
  std::vector<Action> sends, receives;
  for (int i = 0; i < kMessages; ++i) {
    sends.push_back({1, Kind::kSendForward, i});
    receives.push_back({2, Kind::kRecvForward, i});
    if (i % 4 != 3) receives.push_back({2, Kind::kPrefetchForward, i});
  }
  sender.begin(sends);
  receiver.begin(receives);
  for (const Action& send : sends) sender.send(send, {make_tensor({send.micro_batch})});
  EXPECT_TRUE(landing->wait_for_filled(9));  // 0 to 10 without 3 and 7; 11 is the third for the device
  EXPECT_FALSE(receiver.has_arrived({2, Kind::kRecvForward, 11}));
  for (int i = 0; i < kMessages; ++i) {
    EXPECT_EQ(values_of(receiver.wait({2, Kind::kRecvForward, i}).at(0)), std::vector<std::int64_t>{i});
  }
  receiver.finish();
  sender.finish();
}

}  // namespace
}  // namespace fold3d::test
