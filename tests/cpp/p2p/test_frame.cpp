// Frames: what is written is read; anything else is a ProtocolError, never a crash or a wild size.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <random>
#include <span>
#include <stdexcept>
#include <vector>

#include "comm/base/errors.h"
#include "comm/p2p/frame.h"
#include "harness/comm_harness.h"

namespace fold3d::test {
namespace {

using comm::kFrameBytes;
using core::Action;
using core::Kind;

constexpr Action kSend{.chunk = 3, .kind = Kind::kSendForward, .micro_batch = 7};

class DeviceBuffer final : public comm::Buffer {
 public:
  explicit DeviceBuffer(std::size_t bytes) : bytes_(bytes) {}
  std::size_t bytes() const override { return bytes_; }
  std::byte* host_data() override { return nullptr; }

 private:
  std::size_t bytes_;
};

std::vector<std::byte> new_frame() { return std::vector<std::byte>(kFrameBytes); }

TEST(Frame, SmallMessageTravelsInline) {
  auto frame = new_frame();
  const comm::Tensors tensors{make_tensor({1, 2, 3}), make_tensor({}), make_tensor({4})};
  ASSERT_TRUE(comm::write_frame(frame, kSend, 9, tensors));
  const comm::Header header = comm::read_frame(frame);
  EXPECT_EQ(header.send, kSend);
  EXPECT_EQ(header.step, 9u);
  ASSERT_TRUE(header.is_inline);
  ASSERT_EQ(header.tensors.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(header.tensors[i], tensors[i].desc);
  std::array<std::int64_t, 4> payload{};
  ASSERT_EQ(header.payload.size(), sizeof(payload));
  std::memcpy(payload.data(), header.payload.data(), sizeof(payload));
  EXPECT_EQ(payload, (std::array<std::int64_t, 4>{1, 2, 3, 4}));
}

TEST(Frame, LargeMessageTravelsApart) {
  auto frame = new_frame();
  ASSERT_FALSE(comm::write_frame(frame, kSend, 1, {make_tensor(std::vector<std::int64_t>(300))}));
  const comm::Header header = comm::read_frame(frame);
  EXPECT_FALSE(header.is_inline);
  EXPECT_TRUE(header.payload.empty());
  EXPECT_EQ(header.tensors.at(0).bytes(), 2400u);
}

TEST(Frame, PayloadThatJustFitsIsInline) {
  bool was_inline = true;
  std::size_t longest = 0;
  for (std::size_t length = 240; length < 260; ++length) {
    auto frame = new_frame();
    const bool is_inline = comm::write_frame(frame, kSend, 1, {make_tensor(std::vector<std::int64_t>(length, 5))});
    EXPECT_LE(is_inline, was_inline);
    EXPECT_EQ(comm::read_frame(frame).payload.size(), is_inline ? length * 8 : 0);
    if (is_inline) longest = length;
    was_inline = is_inline;
  }
  EXPECT_EQ(longest,
            (kFrameBytes - 48) / 8);  // 32 bytes of prefix, 4 + 8 for a tensor
}

TEST(Frame, MessageWithoutTensorsAndScalars) {
  auto frame = new_frame();
  EXPECT_TRUE(comm::write_frame(frame, kSend, 1, {}));
  EXPECT_TRUE(comm::read_frame(frame).tensors.empty());
  comm::Tensor scalar = make_tensor({42});
  scalar.desc.shape.clear();
  EXPECT_TRUE(comm::write_frame(frame, kSend, 1, {scalar}));
  EXPECT_EQ(comm::read_frame(frame).tensors.at(0), scalar.desc);
}

TEST(Frame, DeviceMemoryIsNeverInline) {
  auto frame = new_frame();
  comm::Tensor tensor = make_tensor({1});
  tensor.buffer = std::make_shared<DeviceBuffer>(8);
  EXPECT_FALSE(comm::write_frame(frame, kSend, 1, {tensor}));
  EXPECT_FALSE(comm::read_frame(frame).is_inline);
}

TEST(Frame, WrongBuffersAreTheSendersError) {
  auto frame = new_frame();
  comm::Tensor tensor = make_tensor({1, 2});
  tensor.desc.shape = {3};
  EXPECT_THROW(comm::write_frame(frame, kSend, 1, {tensor}), std::invalid_argument);
  tensor.desc.shape = {-2};
  EXPECT_THROW(comm::write_frame(frame, kSend, 1, {tensor}), std::invalid_argument);
  tensor.buffer = nullptr;
  tensor.desc.shape = {2};
  EXPECT_THROW(comm::write_frame(frame, kSend, 1, {tensor}), std::invalid_argument);
}

TEST(Frame, TooManyTensorsAreRefusedFiftyAreNot) {
  auto frame = new_frame();
  comm::Tensor tensor = make_tensor({1});
  tensor.desc.shape = {1, 1, 1, 1};
  EXPECT_NO_THROW(comm::write_frame(frame, kSend, 1, comm::Tensors(50, tensor)));
  EXPECT_EQ(comm::read_frame(frame).tensors.size(), 50u);
  EXPECT_THROW(comm::write_frame(frame, kSend, 1, comm::Tensors(60, tensor)), std::invalid_argument);
}

TEST(Frame, OnlyItsUsedBytesCount) {
  auto frame = new_frame();
  comm::write_frame(frame, kSend, 1, {make_tensor({1, 2}), make_tensor({3})});
  const std::size_t used = comm::used_bytes(frame);
  EXPECT_EQ(used, comm::kFramePrefixBytes + 2 * 12 + 3 * 8);
  for (std::size_t i = used; i < frame.size(); ++i) frame[i] = std::byte{0xa5};  // as of the message before
  EXPECT_EQ(comm::read_frame(frame).payload.size(), 3u * 8);
  EXPECT_EQ(comm::read_frame(std::span(frame).first(used)).payload.size(), 3u * 8);
  EXPECT_THROW(comm::read_frame(std::span(frame).first(used - 1)), comm::ProtocolError);
  comm::write_frame(frame, kSend, 1, {make_tensor(std::vector<std::int64_t>(300))});
  EXPECT_EQ(comm::used_bytes(frame), comm::kFramePrefixBytes + 12);
}

TEST(Frame, AnotherLengthThanItsContentsIsAnError) {
  auto frame = new_frame();
  comm::write_frame(frame, kSend, 1, {make_tensor({1, 2}), make_tensor({3})});
  const auto used = static_cast<std::uint16_t>(comm::used_bytes(frame));
  for (const int more : {-1, 1, -40, 500}) {
    const auto wrong = static_cast<std::uint16_t>(used + more);
    std::memcpy(frame.data() + 10, &wrong, sizeof(wrong));  // see Header's layout
    EXPECT_EQ(comm::used_bytes(frame), wrong);
    EXPECT_THROW(comm::read_frame(frame), comm::ProtocolError) << more;
  }
}

TEST(Frame, ForeignBytesAreAnError) {
  auto frame = new_frame();
  EXPECT_THROW(comm::read_frame(frame), comm::ProtocolError);  // zeros
  comm::write_frame(frame, kSend, 1, {make_tensor({1})});
  EXPECT_THROW(comm::read_frame(std::span(frame).first(20)), comm::ProtocolError);
  frame[0] ^= std::byte{1};
  EXPECT_THROW(comm::read_frame(frame), comm::ProtocolError);
}

TEST(Frame, DamagedFramesNeverAnnounceMoreThanTheyMay) {
  auto good = new_frame();
  comm::write_frame(good, kSend, 1, {make_tensor({1, 2, 3}), make_tensor({4})});
  std::mt19937 random(1);
  int refused = 0;
  for (int run = 0; run < 20'000; ++run) {
    auto frame = good;
    for (int flips = 0; flips < 3; ++flips) frame[random() % 80] ^= std::byte(1u << (random() % 8));
    try {
      const comm::Header header = comm::read_frame(frame);
      std::size_t total = 0;
      for (const comm::TensorDesc& desc : header.tensors) total += desc.bytes();
      EXPECT_EQ(header.payload.size(), header.is_inline ? total : 0);
    } catch (const comm::ProtocolError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 5'000);
}

}  // namespace
}  // namespace fold3d::test
