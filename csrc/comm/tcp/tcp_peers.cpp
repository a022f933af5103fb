#include "comm/tcp/tcp_peers.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <utility>
#include <vector>

#include "comm/base/errors.h"

namespace fold3d::comm {

using Clock = TcpSocket::Clock;

namespace {

// The system would take megabytes of a message at once, and the arbiter would let slices go beside it: a send ends when
// what is left of it takes about so long.
constexpr std::size_t kLeastWaitingBytes = 16u << 10, kMostWaitingBytes = 4u << 20;
constexpr double kWaitingSeconds = 1e-3;

constexpr auto kForward = static_cast<std::uint8_t>(Channel::kForward);
constexpr auto kBackward = static_cast<std::uint8_t>(Channel::kBackward);
constexpr std::uint8_t kAgainst = 2;  // added to a channel: the way against its usual one

}  // namespace

TcpPeers::TcpPeers(int stage, int num_stages, const std::string& host, std::string secret, std::string job)
    : stage_(stage),
      num_stages_(num_stages),
      rendezvous_(std::make_unique<TcpRendezvous>(
          host, TcpRendezvous::Job{.secret = std::move(secret), .name = std::move(job)})),
      endpoint_(rendezvous_->endpoint()) {
  waiting_.fill(kLeastWaitingBytes);
}

TcpPeers::~TcpPeers() = default;

void TcpPeers::connect(const Endpoint& next_endpoint, const Endpoint& previous_endpoint,
                       std::chrono::milliseconds timeout, bool both_ways) {
  if (!rendezvous_) throw std::logic_error("TCP peers: connect() was called before");
  std::vector<TcpRendezvous::Call> calls;
  std::vector<ConnectionId> guests;
  const auto add = [&](std::uint8_t number, bool to_next) {
    calls.push_back({.to = to_next ? next_endpoint : previous_endpoint,
                     .line = {.number = number, .caller = stage_, .callee = to_next ? next() : previous()}});
    guests.push_back({.number = number, .caller = to_next ? previous() : next(), .callee = stage_});
  };
  add(kForward, true);
  add(kBackward, false);
  if (both_ways && num_stages_ > 2) {
    add(kForward + kAgainst, false);
    add(kBackward + kAgainst, true);
  }
  auto [outgoing, incoming] = rendezvous_->meet(calls, guests, Clock::now() + timeout);
  for (const auto& socket : outgoing) socket->limit_waiting(kLeastWaitingBytes);
  const std::lock_guard lock(mutex_);
  if (aborted_) throw AbortedError(reason_);
  for (std::size_t way = 0; way < outgoing.size(); ++way) {
    outgoing_[way] = std::move(outgoing[way]);
    incoming_[way] = std::move(incoming[way]);
  }
  rendezvous_.reset();
}

/// By which way a channel leads to a peer.
std::size_t TcpPeers::way_to(Channel channel, int peer) const {
  const bool is_usual = peer == (channel == Channel::kForward ? next() : previous());
  return static_cast<std::size_t>(channel) + (is_usual ? 0 : kAgainst);
}

/// By which way a channel comes from a peer.
std::size_t TcpPeers::way_from(Channel channel, int peer) const {
  const bool is_usual = peer == (channel == Channel::kForward ? previous() : next());
  return static_cast<std::size_t>(channel) + (is_usual ? 0 : kAgainst);
}

void TcpPeers::send(Channel channel, int peer, std::span<const std::byte> first, std::span<const std::byte> second) {
  const std::size_t index = way_to(channel, peer);
  if (!outgoing_[index]) throw std::logic_error("TCP peers: not connected this way");
  const auto start = Clock::now();
  const int error = outgoing_[index]->send_all(first, second);
  if (error != 0) fail("lost the connection to", peer, error);
  const std::size_t bytes = first.size() + second.size();
  if (bytes < waiting_[index] + kLeastWaitingBytes) return;  // too little left to tell the speed
  const double left = static_cast<double>(bytes - waiting_[index]);
  const std::chrono::duration<double> spent = Clock::now() - start;
  const double wanted = left / std::max(spent.count(), 1e-6) * kWaitingSeconds;
  const auto waiting = static_cast<std::size_t>(
      std::clamp(wanted, static_cast<double>(kLeastWaitingBytes), static_cast<double>(kMostWaitingBytes)));
  if (waiting > waiting_[index] - waiting_[index] / 4 && waiting < waiting_[index] + waiting_[index] / 4) return;
  waiting_[index] = waiting;
  outgoing_[index]->limit_waiting(waiting);
}

bool TcpPeers::has_room(Channel channel, int peer) const {
  const auto& socket = outgoing_[way_to(channel, peer)];
  return socket && socket->ready(POLLOUT, Clock::now());  // the system says so of a third of its buffer
}

void TcpPeers::recv(Channel channel, int peer, std::span<std::byte> bytes) {
  const auto& socket = incoming_[way_from(channel, peer)];
  if (!socket) throw std::logic_error("TCP peers: not connected this way");
  const int error = socket->recv_all(bytes);
  if (error != 0) fail("lost the connection to", peer, error);
}

void TcpPeers::fail(const char* what, int peer, int error) const {
  const std::lock_guard lock(mutex_);
  if (aborted_) throw AbortedError(reason_);
  const std::string text = std::string(what) + " stage " + std::to_string(peer) + ": " + text_of_socket_error(error);
  if (error == ETIMEDOUT) throw TimeoutError(text + " (setting comm_timeout)");
  throw CommError(text);
}

void TcpPeers::abort(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (aborted_) return;
  aborted_ = true;
  reason_ = reason;
  if (rendezvous_) rendezvous_->abort(reason);
  for (const auto* sockets : {&outgoing_, &incoming_}) {
    for (const auto& socket : *sockets) {
      if (socket) socket->shutdown();
    }
  }
}

}  // namespace fold3d::comm
