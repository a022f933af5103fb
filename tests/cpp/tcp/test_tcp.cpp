// The TCP links: whole schedules over them, strangers, ends.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <future>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "comm/base/errors.h"
#include "comm/tcp/tcp_peers.h"
#include "harness/comm_harness.h"
#include "harness/stranger.h"

namespace fold3d::test {
namespace {

using namespace std::chrono_literals;
using comm::Channel;
using comm::TcpPeers;

const std::string kSecret(32, 's');

/// Two stages that found each other.
struct Pair {
  TcpPeers first{0, 2, "127.0.0.1", kSecret};
  TcpPeers second{1, 2, "127.0.0.1", kSecret};

  Pair() {
    std::thread other([this] { second.connect(first.endpoint(), first.endpoint(), 10s); });
    first.connect(second.endpoint(), second.endpoint(), 10s);
    other.join();
  }
};

TEST(Tcp, WholeSchedulesArriveInOrderWithRandomDelays) {
  std::mt19937_64 random(7);
  for (int index = 0; index < 12; ++index) {
    static const std::string kNames[] = {"1f1b", "interleaved", "aiao"};
    const std::string& name = kNames[index % 3];
    const int pp = 2 + static_cast<int>(random() % 3);
    const RunSetup setup{.schedules = {lowered(name, pp, name == "1f1b" ? 1 : 2, 1 + static_cast<int>(random() % 6))},
                         .loopback = {.seed = random()},
                         .options = {.timeout = 30s, .receive_ahead = static_cast<int>(random() % 3)},
                         .steps = 3,
                         .max_compute_us = 200,
                         .over_tcp = true};
    for (const std::string& error : run_ranks(setup)) ASSERT_EQ(error, "") << name << " pp=" << pp;
  }
}

TEST(Tcp, TheTwoDirectionsAndChannelsAreIndependent) {
  Pair pair;
  const std::array<std::byte, 1> a{std::byte{1}}, b{std::byte{2}};
  pair.first.send(Channel::kForward, 1, a);
  pair.first.send(Channel::kBackward, 1, b);
  std::array<std::byte, 1> got{};
  pair.second.recv(Channel::kBackward, 0, got);
  EXPECT_EQ(got, b);
  pair.second.recv(Channel::kForward, 0, got);
  EXPECT_EQ(got, a);
}

TEST(Tcp, AbortEndsABlockedReceiveWithItsReason) {
  Pair pair;
  std::string text;
  std::thread blocked([&] {
    std::array<std::byte, 8> bytes{};
    try {
      pair.first.recv(Channel::kForward, 1, bytes);
    } catch (const comm::AbortedError& error) {
      text = error.what();
    }
  });
  pair.first.abort("enough");
  blocked.join();
  EXPECT_EQ(text, "enough");
  EXPECT_THROW(pair.first.send(Channel::kForward, 1, std::array<std::byte, 1>{}), comm::AbortedError);
}

TEST(Tcp, AbortEndsASendThatNobodyReads) {
  Pair pair;
  const std::vector<std::byte> large(64u << 20);
  std::thread blocked([&] { EXPECT_THROW(pair.first.send(Channel::kForward, 1, large), comm::AbortedError); });
  pair.first.abort("enough");
  blocked.join();
}

TEST(Tcp, ASendEndsWhenTheBytesTravelNotWhenTheSystemHasThem) {
  Pair pair;
  std::vector<std::byte> message(3u << 20);  // the system would take as much
  auto sending = std::async(std::launch::async, [&] { pair.first.send(Channel::kForward, 1, message); });
  EXPECT_EQ(sending.wait_for(50ms), std::future_status::timeout);
  std::vector<std::byte> got(message.size());
  pair.second.recv(Channel::kForward, 0, got);
  sending.get();
}

TEST(Tcp, APeerThatGoesAwayIsNamed) {
  Pair pair;
  pair.second.abort("gone");
  std::array<std::byte, 8> bytes{};
  try {
    pair.first.recv(Channel::kForward, 1, bytes);
    FAIL() << "received from nobody";
  } catch (const comm::CommError& error) {
    EXPECT_NE(std::string(error.what()).find("lost the connection to stage 1"), std::string::npos) << error.what();
  }
}

TEST(Tcp, AStrangerIsRefusedAndThePeerStillGetsIn) {
  TcpPeers first(0, 2, "127.0.0.1", kSecret), second(1, 2, "127.0.0.1", kSecret);
  const Stranger stranger(first.endpoint());
  std::thread other([&] { second.connect(first.endpoint(), first.endpoint(), 10s); });
  first.connect(second.endpoint(), second.endpoint(), 10s);
  other.join();
  EXPECT_TRUE(stranger.was_refused());
}

TEST(Tcp, AnotherJobsSecretIsRefused) {
  TcpPeers first(0, 2, "127.0.0.1", kSecret), second(1, 2, "127.0.0.1", std::string(32, 't'));
  std::thread other([&] { EXPECT_THROW(second.connect(first.endpoint(), first.endpoint(), 300ms), comm::CommError); });
  EXPECT_THROW(first.connect(second.endpoint(), second.endpoint(), 300ms), comm::CommError);
  other.join();
}

TEST(Tcp, AStageThatNeverConnectsIsATimeout) {
  TcpPeers first(0, 2, "127.0.0.1", kSecret), silent(1, 2, "127.0.0.1", kSecret);
  try {
    first.connect(silent.endpoint(), silent.endpoint(), 200ms);
    FAIL() << "connected to nobody";
  } catch (const comm::TimeoutError& error) {
    EXPECT_NE(std::string(error.what()).find("stage 1"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace fold3d::test
