// What a message is on a TCP connection: the used part of its frame, then its payload, and no byte more.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/base/errors.h"
#include "comm/p2p/communicator.h"
#include "comm/p2p/frame.h"
#include "comm/tcp/tcp_peers.h"
#include "comm/tcp/transport_tcp.h"
#include "harness/comm_harness.h"
#include "harness/raw_stage.h"

namespace fold3d::test {
namespace {

using core::parse_action;

constexpr std::size_t kOverhead = 150;    // bytes of a message beyond its tensors, as long as these are few
constexpr std::size_t kUsedBytesAt = 10;  // where a frame says how long it is

const std::string kSecret(32, 's');

/// Stage 0 of two as a communicator over TCP; stage 1 is bare connections.
struct WatchedStage {
  std::shared_ptr<comm::TcpPeers> links = std::make_shared<comm::TcpPeers>(0, 2, "127.0.0.1", kSecret);
  RawStage peer{kSecret};
  comm::Communicator communicator{std::make_unique<comm::TcpTransport>(links), options_for(2, 0)};

  WatchedStage() { peer.meet(*links); }

  /// The bytes that these tensors are on the connection.
  std::vector<std::byte> sent(const comm::Tensors& tensors) {
    communicator.begin(program({"0SEND_F0"}));
    communicator.send(parse_action("0SEND_F0"), tensors);
    communicator.finish();
    links->abort("enough");
    return peer.recv_forward();
  }
};

/// A peer that takes nothing: small messages, which the caller's thread sends itself, fill the connection.
TEST(TcpMessages, AFullConnectionEndsInATimeout) {
  constexpr int kMessages = 20'000;  // more than all buffers between the two take
  auto links = std::make_shared<comm::TcpPeers>(0, 2, "127.0.0.1", kSecret);
  RawStage peer{kSecret};
  comm::Options options = options_for(2, 0);
  options.timeout = std::chrono::milliseconds(500);
  comm::Communicator communicator{std::make_unique<comm::TcpTransport>(links), options};
  peer.meet(*links);
  std::vector<core::Action> sends;
  for (int k = 0; k < kMessages; ++k) sends.push_back(parse_action("0SEND_F" + std::to_string(k)));
  communicator.begin(sends);
  EXPECT_THROW(
      {
        for (const core::Action& send : sends) communicator.send(send, {make_tensor({1, 2, 3})});
        communicator.finish();
      },
      comm::TimeoutError);
}

std::vector<std::int64_t> numbers(std::size_t count) {
  std::vector<std::int64_t> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<std::int64_t>(i * i);
  return values;
}

TEST(TcpMessages, APayloadTravelsWithFewMoreBytes) {
  WatchedStage stage;
  const auto values = numbers(1024);
  const auto sent = stage.sent({make_tensor(values)});
  constexpr std::size_t kPayload = 8192;
  ASSERT_GT(sent.size(), kPayload);
  EXPECT_LE(sent.size(), kPayload + kOverhead);
  EXPECT_EQ(std::memcmp(sent.data() + sent.size() - kPayload, values.data(), kPayload), 0);
  const auto records = stage.communicator.take_records();
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].bytes, kPayload);
}

TEST(TcpMessages, ASmallMessageIsAShortFrame) {
  const auto sent = WatchedStage().sent({make_tensor({7})});
  EXPECT_LE(sent.size(), sizeof(std::int64_t) + kOverhead);
  EXPECT_EQ(comm::used_bytes(sent), sent.size());
  EXPECT_EQ(comm::read_frame(sent).payload.size(), sizeof(std::int64_t));
}

TEST(TcpMessages, EveryTensorOfAMessageArrivesAndEmptyOnesCostNothing) {
  const std::size_t one = WatchedStage().sent({make_tensor(numbers(500))}).size();
  const auto sent = WatchedStage().sent({make_tensor({}), make_tensor(numbers(500)), make_tensor(numbers(400))});
  EXPECT_EQ(comm::read_frame(std::span(sent).first(comm::used_bytes(sent))).tensors.size(), 3u);
  EXPECT_EQ(sent.size(), one + 400 * sizeof(std::int64_t) + 2 * 12);  // two more descriptions of one dimension
}

TEST(TcpMessages, AMessageMayArriveInPiecesOfAnySize) {
  WatchedStage stage;
  stage.communicator.begin(program({"0RECV_B0", "0RECV_B1", "0RECV_B2"}));
  const comm::Tensor large = make_tensor(numbers(300));
  std::vector<std::byte> all;
  for (int index = 0; index < 3; ++index) {
    const comm::Tensor tensor = index == 1 ? large : make_tensor({index});
    const auto frame = frame_of("1SEND_B" + std::to_string(index), 1, {tensor});
    all.insert(all.end(), frame.begin(), frame.begin() + static_cast<std::ptrdiff_t>(comm::used_bytes(frame)));
    const std::byte* const payload = tensor.buffer->host_data();
    if (index == 1) all.insert(all.end(), payload, payload + tensor.buffer->bytes());
  }
  std::size_t size = 1;
  for (std::span<const std::byte> rest(all); !rest.empty(); size = size % 7 + 1) {
    const auto piece = rest.first(std::min(size, rest.size()));
    stage.peer.send_backward(piece);
    rest = rest.subspan(piece.size());
  }
  EXPECT_EQ(values_of(stage.communicator.wait(parse_action("0RECV_B0")).at(0)), std::vector<std::int64_t>{0});
  EXPECT_EQ(values_of(stage.communicator.wait(parse_action("0RECV_B1")).at(0)), numbers(300));
  EXPECT_EQ(values_of(stage.communicator.wait(parse_action("0RECV_B2")).at(0)), std::vector<std::int64_t>{2});
  stage.communicator.finish();
}

TEST(TcpMessages, ALengthThatCannotBeIsAProtocolError) {
  for (const std::size_t length :
       {std::size_t{0}, comm::kFramePrefixBytes - 1, comm::kFrameBytes + 1, std::size_t{65535}}) {
    WatchedStage stage;
    auto frame = frame_of("1SEND_B0", 1, {make_tensor({1})});
    const auto wrong = static_cast<std::uint16_t>(length);
    std::memcpy(frame.data() + kUsedBytesAt, &wrong, sizeof(wrong));
    stage.communicator.begin(program({"0RECV_B0"}));
    stage.peer.send_backward(frame);
    try {
      stage.communicator.wait(parse_action("0RECV_B0"));
      FAIL() << "took a frame of " << length << " bytes";
    } catch (const comm::ProtocolError& error) {
      EXPECT_NE(std::string(error.what()).find("a frame of " + std::to_string(length) + " bytes"), std::string::npos)
          << error.what();
    }
  }
}

}  // namespace
}  // namespace fold3d::test
