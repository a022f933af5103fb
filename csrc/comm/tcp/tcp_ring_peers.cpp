#include "comm/tcp/tcp_ring_peers.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "comm/base/errors.h"

namespace fold3d::comm {
namespace {

using Members = TcpRingPeers::Members;

/// Numbers of the lines at the rendezvous; TcpPeers has 0 and 1.
struct Lines {
  std::uint8_t first;
  std::uint8_t end;
};

constexpr Lines lines_of(Members members) {
  return members == Members::kReplicas ? Lines{3, 3 + 2 * TcpRingPeers::kMostLines} : Lines{2, 3};
}

constexpr double kFastLink = 125e6;  // bytes per second

/// The most that one connection may have on its way: of what the system grants, half is its own bookkeeping.
double most_in_flight() {
  std::ifstream file("/proc/sys/net/ipv4/tcp_wmem");
  double least = 0, first = 0, most = 0;
  return file >> least >> first >> most ? most / 2 : 2e6;
}

const char* noun_of(Members members) { return members == Members::kReplicas ? "replica" : "tensor-parallel rank"; }

[[noreturn]] void fail(const std::string& what, const std::string& peer, int error) {
  const std::string text = what + " " + peer + ": " + text_of_socket_error(error);
  if (error == ETIMEDOUT) throw TimeoutError(text + " (setting comm_timeout)");
  throw CommError(text);
}

}  // namespace

class TcpRingPeers::Link final : public RingConnection {
 public:
  Link(std::unique_ptr<TcpSocket> outgoing, std::unique_ptr<TcpSocket> incoming, std::string next, std::string previous)
      : outgoing_(std::move(outgoing)),
        incoming_(std::move(incoming)),
        next_(std::move(next)),
        previous_(std::move(previous)) {}

  void send(std::span<const std::byte> header, std::span<const std::byte> payload) override {
    check(outgoing_->send_all(header, payload), next_);
  }
  void recv(std::span<std::byte> bytes) override { check(incoming_->recv_all(bytes), previous_); }

  void abort(const std::string& reason) noexcept override {
    const std::lock_guard lock(mutex_);
    if (aborted_) return;
    aborted_ = true;
    reason_ = reason;
    outgoing_->shutdown();
    incoming_->shutdown();
  }

  bool can_split() const override { return true; }
  SendQueue queue() const override {
    const TcpSocket::Progress progress = outgoing_->progress();
    return {.arrived = progress.acknowledged,
            .waiting = progress.waiting,
            .is_empty = progress.is_empty,
            .is_known = progress.is_known};
  }
  double round_trip_seconds() const override { return outgoing_->progress().round_trip_seconds; }
  void limit_waiting(std::size_t bytes, std::size_t at_once) override { outgoing_->limit_waiting(bytes, at_once); }
  void limit_window(std::size_t bytes) override { incoming_->limit_window(bytes); }
  void close_window() override { incoming_->close_window(); }
  void open_window() override { incoming_->open_window(); }

 private:
  void check(int error, const std::string& peer) {
    if (error == 0) return;
    const std::lock_guard lock(mutex_);
    if (aborted_) throw AbortedError(reason_);
    fail("lost the connection to", peer, error);
  }

  const std::unique_ptr<TcpSocket> outgoing_, incoming_;
  const std::string next_, previous_;  // as errors call them
  std::mutex mutex_;
  bool aborted_ = false;
  std::string reason_;
};

TcpRingPeers::TcpRingPeers(int rank, int size, const std::string& host, std::string secret, std::string job,
                           Members members)
    : rank_(rank),
      size_(size),
      members_(members),
      rendezvous_(std::make_unique<TcpRendezvous>(
          host, TcpRendezvous::Job{.secret = std::move(secret), .name = std::move(job), .peers = noun_of(members)})),
      endpoint_(rendezvous_->endpoint()) {
  if (size < 2 || rank < 0 || rank >= size) {
    throw std::invalid_argument("ring peers: there is no " + std::string(noun_of(members)) + " " +
                                std::to_string(rank) + " among " + std::to_string(size) + "; a ring has at least 2");
  }
}

TcpRingPeers::~TcpRingPeers() = default;

void TcpRingPeers::connect(const Endpoint& next_endpoint, std::chrono::milliseconds timeout) {
  if (!rendezvous_) throw std::logic_error("ring peers: connect() was called before");
  const int next = (rank_ + 1) % size_;
  const int previous = (rank_ + size_ - 1) % size_;
  const auto [first, end] = lines_of(members_);
  std::vector<TcpRendezvous::Call> calls;
  std::vector<ConnectionId> guests;
  for (std::uint8_t number = first; number < end; ++number) {
    calls.push_back({.to = next_endpoint, .line = {.number = number, .caller = rank_, .callee = next}});
    guests.push_back({.number = number, .caller = previous, .callee = rank_});
  }
  auto [outgoing, incoming] = rendezvous_->meet(calls, guests, TcpSocket::Clock::now() + timeout);
  const std::string noun = std::string(noun_of(members_)) + " ";
  const std::lock_guard lock(mutex_);
  if (aborted_) throw AbortedError(reason_);
  for (std::size_t i = 0; i < calls.size(); ++i) {
    links_.push_back(std::make_shared<Link>(std::move(outgoing[i]), std::move(incoming[i]), noun + std::to_string(next),
                                            noun + std::to_string(previous)));
  }
  rendezvous_.reset();
}

void TcpRingPeers::abort(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (aborted_) return;
  aborted_ = true;
  reason_ = reason;
  if (rendezvous_) rendezvous_->abort(reason);
  for (const auto& connection : links_) connection->abort(reason);
}

std::shared_ptr<RingConnection> TcpRingPeers::connection(NicArbiter::Traffic traffic, int index) const {
  const bool is_tensor = traffic == NicArbiter::Traffic::kTensor;
  if (is_tensor != (members_ == Members::kTensorParallel)) {
    throw std::logic_error("ring peers: these are lines of " + std::string(noun_of(members_)) + "s");
  }
  const int place = is_tensor ? index : 2 * index + static_cast<int>(traffic);
  if (place < 0 || place >= static_cast<int>(links_.size())) {
    throw std::logic_error("ring peers: not connected yet, or there is no such line");
  }
  return links_[static_cast<std::size_t>(place)];
}

int TcpRingPeers::lines_needed() const {
  const double in_flight = kFastLink * connection(NicArbiter::Traffic::kReduce)->round_trip_seconds();
  return static_cast<int>(std::clamp(std::ceil(in_flight / most_in_flight()), 1.0, double{kMostLines}));
}

}  // namespace fold3d::comm
