#include "raw_stage.h"

#include <chrono>
#include <cstdint>
#include <future>
#include <stdexcept>
#include <utility>

#include "comm/transport.h"

namespace fold3d::test {
namespace {

constexpr std::chrono::seconds kTimeout{30};

constexpr std::size_t index_of(comm::Channel channel) { return static_cast<std::size_t>(channel); }

}  // namespace

void RawStage::meet(comm::TcpLinks& first) {
  const auto deadline = comm::TcpSocket::Clock::now() + kTimeout;
  auto other = std::async(std::launch::async, [&] { first.connect(door_.endpoint(), door_.endpoint(), kTimeout); });
  for (std::uint8_t line = 0; line < outgoing_.size(); ++line) {
    outgoing_[line] = door_.call(first.endpoint(), line, deadline);
  }
  const auto missing = [this](std::uint8_t line) { return line < incoming_.size() && !incoming_[line]; };
  while (missing(0) || missing(1)) {
    std::uint8_t line = 0;
    auto socket = door_.open(missing, line, deadline);
    if (!socket) throw std::runtime_error("stage 0 did not call");
    incoming_[line] = std::move(socket);
  }
  other.get();
  for (std::uint8_t line = 0; line < outgoing_.size(); ++line) {
    if (!outgoing_[line] || door_.confirm(*outgoing_[line], line, deadline) != comm::TcpDoor::Answer::kYes) {
      throw std::runtime_error("stage 0 did not answer");
    }
  }
}

void RawStage::send_backward(std::span<const std::byte> bytes) const {
  if (outgoing_[index_of(comm::Channel::kBackward)]->send_all(bytes) != 0) throw std::runtime_error("not sent");
}

std::vector<std::byte> RawStage::recv_forward() const {
  std::vector<std::byte> all;
  std::array<std::byte, 1> byte{};
  while (incoming_[index_of(comm::Channel::kForward)]->recv_all(byte) == 0) all.push_back(byte[0]);
  return all;
}

}  // namespace fold3d::test
