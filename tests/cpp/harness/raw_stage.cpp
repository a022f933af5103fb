#include "harness/raw_stage.h"

#include <array>
#include <chrono>
#include <cstdint>
#include <future>
#include <stdexcept>
#include <vector>

#include "comm/p2p/transport.h"

namespace fold3d::test {
namespace {

constexpr std::chrono::seconds kTimeout{30};

constexpr std::size_t index_of(comm::Channel channel) { return static_cast<std::size_t>(channel); }

}  // namespace

void RawStage::meet(comm::TcpPeers& first) {
  auto other =
      std::async(std::launch::async, [&] { first.connect(rendezvous_.endpoint(), rendezvous_.endpoint(), kTimeout); });
  std::vector<comm::TcpRendezvous::Call> calls;
  std::vector<comm::ConnectionId> guests;
  for (std::uint8_t number = 0; number < 2; ++number) {
    calls.push_back({.to = first.endpoint(), .line = {.number = number, .caller = 1, .callee = 0}});
    guests.push_back({.number = number, .caller = 0, .callee = 1});
  }
  connections_ = rendezvous_.meet(calls, guests, comm::TcpSocket::Clock::now() + kTimeout);
  other.get();
}

void RawStage::send_backward(std::span<const std::byte> bytes) const {
  if (connections_.outgoing[index_of(comm::Channel::kBackward)]->send_all(bytes) != 0)
    throw std::runtime_error("not sent");
}

std::vector<std::byte> RawStage::recv_forward() const {
  std::vector<std::byte> all;
  std::array<std::byte, 1> byte{};
  while (connections_.incoming[index_of(comm::Channel::kForward)]->recv_all(byte) == 0) all.push_back(byte[0]);
  return all;
}

}  // namespace fold3d::test
