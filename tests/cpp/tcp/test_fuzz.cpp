// Whatever arrives where a message, a chunk or a greeting should: it is refused, or it is what its sender would write.
// FOLD3D_FUZZ_RUNS says how many inputs each test makes (make -C tests/cpp fuzz: a million, under AddressSanitizer).
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "comm/base/errors.h"
#include "comm/p2p/frame.h"
#include "comm/rendezvous/handshake.h"
#include "comm/rendezvous/pending_peer.h"
#include "comm/ring/slice_header.h"
#include "harness/comm_harness.h"
#include "harness/stress.h"

namespace fold3d::test {
namespace {

using Bytes = std::vector<std::byte>;
using Random = std::mt19937_64;

std::size_t below(Random& random, std::size_t bound) { return bound == 0 ? 0 : random() % bound; }

/// Changes `bytes` as damage, other programs and attackers would: bits, whole fields with numbers at the edge of their
/// range, pieces that are missing, doubled or from `other`. Never longer than `longest`.
void mutate(Bytes& bytes, const Bytes& other, std::size_t longest, Random& random) {
  static constexpr std::uint64_t kEdges[] = {0,
                                             1,
                                             2,
                                             0x7f,
                                             0x80,
                                             0xff,
                                             0x7fff,
                                             0xffff,
                                             0x7fffffff,
                                             0x80000000,
                                             0xffffffff,
                                             std::numeric_limits<std::int64_t>::max(),
                                             std::uint64_t{1} << 63,
                                             std::numeric_limits<std::uint64_t>::max()};
  const auto at = [](Bytes& all, std::size_t i) { return all.begin() + static_cast<std::ptrdiff_t>(i); };
  for (std::size_t changes = 1 + below(random, 4); changes > 0; --changes) {
    const std::size_t place = below(random, std::min<std::size_t>(bytes.size(), 96));  // headers are in front
    switch (random() % 8) {
      case 0:
      case 1:
        if (!bytes.empty()) bytes[place] ^= static_cast<std::byte>(1u << random() % 8);
        break;
      case 2:
        if (!bytes.empty()) bytes[place] = static_cast<std::byte>(random());
        break;
      case 3:
      case 4: {
        const std::uint64_t value = kEdges[random() % std::size(kEdges)];
        const std::size_t width = std::size_t{1} << random() % 4;
        if (place + width <= bytes.size()) std::memcpy(bytes.data() + place, &value, width);
        break;
      }
      case 5:
        bytes.resize(below(random, bytes.size() + 1));
        break;
      case 6: {
        const std::size_t end = place + below(random, bytes.size() - place + 1);
        if (random() % 2 == 0) {
          bytes.erase(at(bytes, place), at(bytes, end));
        } else {
          const Bytes piece(at(bytes, place), at(bytes, end));
          bytes.insert(at(bytes, place), piece.begin(), piece.end());
        }
        break;
      }
      case 7: {
        const std::size_t from = below(random, other.size());
        const std::size_t count = below(random, std::min(other.size() - from, bytes.size() - place) + 1);
        std::copy_n(other.begin() + static_cast<std::ptrdiff_t>(from), count, at(bytes, place));
        break;
      }
    }
    if (bytes.size() > longest) bytes.resize(longest);
  }
  bytes.shrink_to_fit();  // AddressSanitizer sees whoever reads beyond
}

/// A frame that a sender might write.
Bytes any_frame(Random& random) {
  comm::Tensors tensors;
  for (std::size_t count = below(random, 4); count > 0; --count) {
    static constexpr std::size_t kLengths[] = {0, 1, 3, 40, 300};
    comm::Tensor tensor = make_tensor(std::vector<std::int64_t>(kLengths[random() % std::size(kLengths)], 7));
    for (std::size_t extra = below(random, 4); extra > 0; --extra)
      tensor.desc.shape.insert(tensor.desc.shape.begin(), 1);
    tensor.desc.requires_grad = random() % 2 == 0;
    tensors.push_back(std::move(tensor));
  }
  const char* const kind = random() % 2 == 0 ? "SEND_F" : "SEND_B";
  return frame_of(std::to_string(random() % 64) + kind + std::to_string(random() % 64),
                  static_cast<std::uint32_t>(random()), tensors);
}

/// What a sender writes that says what `header` says; the header is of an inline message.
Bytes written_again(const comm::Header& header) {
  comm::Tensors tensors;
  std::span<const std::byte> rest = header.payload;
  for (const comm::TensorDesc& desc : header.tensors) {
    auto buffer = std::make_shared<comm::HostBuffer>(desc.bytes());
    if (desc.bytes() > 0) std::memcpy(buffer->host_data(), rest.data(), desc.bytes());
    rest = rest.subspan(desc.bytes());
    tensors.push_back({.desc = desc, .buffer = std::move(buffer)});
  }
  Bytes frame(comm::kFrameBytes);
  comm::write_frame(frame, header.send, header.step, tensors);
  frame.resize(comm::used_bytes(frame));
  return frame;
}

TEST(Fuzz, AFrameIsRefusedOrWhatItsSenderWouldWrite) {
  Random random(1);
  int refused = 0, read = 0;
  const int runs = fuzz_runs(50'000);
  for (int run = 0; run < runs; ++run) {
    Bytes frame = any_frame(random);
    if (random() % 2 == 0) frame.resize(comm::used_bytes(frame));
    mutate(frame, any_frame(random), comm::kFrameBytes, random);
    try {
      const std::size_t used = comm::used_bytes(frame);
      ASSERT_TRUE(used >= comm::kFramePrefixBytes && used <= comm::kFrameBytes) << run;
      const comm::Header header = comm::read_frame(frame);
      ++read;
      ASSERT_TRUE(core::is_send(header.send.kind) && header.send.chunk >= 0 && header.send.micro_batch >= 0) << run;
      std::size_t total = 0;
      for (const comm::TensorDesc& desc : header.tensors) total += desc.bytes();
      ASSERT_LE(total, comm::kMostPayloadBytes) << run;
      ASSERT_EQ(header.payload.size(), header.is_inline ? total : 0) << run;
      if (header.is_inline) {
        ASSERT_EQ(written_again(header), Bytes(frame.begin(), frame.begin() + static_cast<std::ptrdiff_t>(used)))
            << run;
      }
    } catch (const comm::ProtocolError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, runs / 4);
  EXPECT_GT(read, runs / 50);
}

TEST(Fuzz, AGreetingIsRefusedOrWhatItsCallerWouldWrite) {
  Random random(2);
  int refused = 0;
  const int runs = fuzz_runs(50'000);
  const auto any = [&] {
    const comm::Greeting greeting{.line = {.number = static_cast<std::uint8_t>(random()),
                                           .caller = static_cast<std::int32_t>(random()),
                                           .callee = static_cast<std::int32_t>(random())}};
    const auto bytes = comm::greeting_bytes(greeting);
    return Bytes(bytes.begin(), bytes.end());
  };
  for (int run = 0; run < runs; ++run) {
    Bytes bytes = any();
    mutate(bytes, any(), 2 * comm::kGreetingBytes, random);
    const auto greeting = comm::read_greeting(bytes);
    if (greeting) {
      const auto again = comm::greeting_bytes(*greeting);
      ASSERT_EQ(Bytes(again.begin(), again.end()), bytes) << run;
    } else {
      ++refused;
    }
  }
  EXPECT_GT(refused, runs / 4);
}

TEST(Fuzz, NobodyGetsInByChance) {
  // A whole conversation, of which any byte may be changed and any piece may be missing, in pieces of any size.
  Random random(3);
  const comm::Handshake handshake(std::string(32, 's'), "");
  const comm::ConnectionId line{.number = 0, .caller = 1, .callee = 0};
  const auto wanted = [&](const comm::ConnectionId& asked) { return asked == line; };
  int known = 0;
  const int runs = fuzz_runs(50'000) / 10;
  for (int run = 0; run < runs; ++run) {
    std::array<int, 2> ends{};
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends.data()), 0);
    const comm::TcpSocket caller(ends[0]);
    comm::PendingPeer guest(std::make_unique<comm::TcpSocket>(ends[1]), comm::TcpSocket::Clock::now());
    const comm::Greeting greeting{.line = line, .nonce = comm::fresh_nonce()};
    auto state = comm::PendingPeer::State::kStranger;
    const auto say = [&](const Bytes& bytes) {
      for (std::size_t said = 0; said < bytes.size() && state == comm::PendingPeer::State::kStranger;) {
        const std::size_t count = 1 + below(random, bytes.size() - said);
        caller.send_now(std::span(bytes).subspan(said, count));
        said += count;
        state = guest.advance(handshake, wanted);
      }
    };
    const auto first = comm::greeting_bytes(greeting);
    Bytes said(first.begin(), first.end());
    const bool changes_greeting = random() % 3 == 0;
    if (changes_greeting) mutate(said, Bytes(first.begin(), first.end()), 2 * said.size(), random);
    const bool same_greeting = std::equal(said.begin(), said.end(), first.begin(), first.end());
    say(said);
    comm::Nonce nonce{};
    std::size_t got = 0;
    caller.recv_now(nonce, got);
    const comm::Digest proof = handshake.caller_proof(greeting, nonce);
    said.assign(proof.begin(), proof.end());
    if (random() % 4 != 0) mutate(said, Bytes(nonce.begin(), nonce.end()), 2 * said.size(), random);
    say(said);
    const bool right = same_greeting && got == nonce.size() && said.size() >= proof.size() &&
                       std::equal(proof.begin(), proof.end(), said.begin());
    ASSERT_EQ(state == comm::PendingPeer::State::kKnown, right) << run;
    known += right ? 1 : 0;
  }
  EXPECT_GT(known, runs / 20);
}

TEST(Fuzz, ASliceNeverGoesBeyondItsRound) {
  Random random(4);
  int refused = 0;
  const int runs = fuzz_runs(50'000);
  for (int run = 0; run < runs; ++run) {
    std::vector<float> whole(200);
    const std::span<std::byte> bytes_of_whole = std::as_writable_bytes(std::span(whole));
    const comm::Exchange exchange = comm::Exchange::reduce_scatter(
        {.number = comm::Number::kFloat32, .bucket = static_cast<int>(random() % 4), .step = 3},
        {.length = 200, .unit_bytes = 4}, bytes_of_whole, bytes_of_whole.first(400));
    const std::size_t offset = 4 * below(random, 100);
    const comm::SliceHeader expected = comm::slice_header(exchange, 7, 1, offset, 4);
    Bytes bytes(sizeof(expected));
    std::memcpy(bytes.data(), &expected, sizeof(expected));
    mutate(bytes, bytes, bytes.size(), random);
    bytes.resize(sizeof(expected));  // a ring reads exactly as many
    comm::SliceHeader arrived;
    std::memcpy(&arrived, bytes.data(), sizeof(arrived));
    try {
      comm::check_slice(arrived, expected, 400 - offset);
      ASSERT_TRUE(arrived.offset == expected.offset && arrived.bytes > 0 && arrived.bytes % 4 == 0) << run;
      ASSERT_LE(arrived.offset + arrived.bytes, 400u) << run;
    } catch (const comm::ProtocolError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, runs / 4);
}

}  // namespace
}  // namespace fold3d::test
