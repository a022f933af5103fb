#include "comm/rendezvous/rendezvous_round.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "comm/base/errors.h"

namespace fold3d::comm {
namespace {

using namespace std::chrono_literals;

constexpr auto kStrangersPatience = 10s;  // for two round trips
constexpr auto kRest = 100ms;             // of a rendezvous that the system gives no sockets
constexpr int kMostAtOnce = 64;           // let in before others are heard

}  // namespace

RendezvousRound::RendezvousRound(const TcpRendezvous& rendezvous, const std::vector<TcpRendezvous::Call>& calls,
                                 const std::vector<ConnectionId>& guests, Clock::time_point deadline)
    : rendezvous_(rendezvous), expected_(guests), deadline_(deadline), incoming_(guests.size()) {
  callers_.reserve(calls.size());
  for (const TcpRendezvous::Call& call : calls) {
    callers_.emplace_back(call, rendezvous_.handshake_,
                          rendezvous_.job_.peers + " " + std::to_string(call.line.callee));
  }
}

TcpRendezvous::Connections RendezvousRound::run() {
  for (;;) {
    rendezvous_.check_aborted();
    for (TcpConnector& caller : callers_) caller.advance();
    hear();
    if (done()) break;
    if (Clock::now() >= deadline_) throw_late();
    wait();
    open();
  }
  TcpRendezvous::Connections found;
  for (TcpConnector& caller : callers_) found.outgoing.push_back(caller.take());
  found.incoming = std::move(incoming_);
  return found;
}

bool RendezvousRound::done() const {
  return std::all_of(callers_.begin(), callers_.end(), [](const TcpConnector& caller) { return caller.done(); }) &&
         std::all_of(incoming_.begin(), incoming_.end(), [](const auto& socket) { return socket != nullptr; });
}

void RendezvousRound::wait() {
  const auto now = Clock::now();
  const bool rests = now < door_rests_;
  Clock::time_point wake = rests ? std::min(deadline_, door_rests_) : deadline_;
  // Without events the listener still reports that it was shut down.
  std::vector<pollfd> polled{{rendezvous_.listener_->fd(), static_cast<short>(rests ? 0 : POLLIN), 0}};
  for (const TcpConnector& caller : callers_) {
    if (caller.done()) continue;
    wake = std::min(wake, caller.wake());
    polled.push_back({caller.fd(), caller.events(), 0});
  }
  for (const PendingPeer& stranger : strangers_) {
    wake = std::min(wake, stranger.deadline());
    polled.push_back({stranger.fd(), POLLIN, 0});
  }
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(wake - now).count();
  ::poll(polled.data(), polled.size(), static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000)));
}

void RendezvousRound::open() {
  if (Clock::now() < door_rests_) return;
  for (int i = 0; i < kMostAtOnce; ++i) {
    auto socket = std::make_unique<TcpSocket>(
        ::accept4(rendezvous_.listener_->fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket->fd() >= 0) {
      if (strangers_.size() == kMostStrangers) strangers_.pop_front();  // a rank would call again
      strangers_.emplace_back(std::move(socket), Clock::now() + kStrangersPatience);
    } else if (errno == EAGAIN) {
      return;
    } else if ((errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) && !strangers_.empty()) {
      strangers_.pop_front();
    } else if (errno != EINTR && errno != ECONNABORTED) {
      door_rests_ = Clock::now() + kRest;  // poll would say at once that somebody is there, and again
      return;
    }
  }
}

void RendezvousRound::hear() {
  const auto index_of = [this](const ConnectionId& line) {
    return static_cast<std::size_t>(std::find(expected_.begin(), expected_.end(), line) - expected_.begin());
  };
  const auto wanted = [&](const ConnectionId& line) {
    const std::size_t index = index_of(line);
    return index < expected_.size() && !incoming_[index];
  };
  const auto now = Clock::now();
  std::erase_if(strangers_, [&](PendingPeer& guest) {
    const PendingPeer::State state = guest.advance(rendezvous_.handshake_, wanted);
    if (state == PendingPeer::State::kKnown) incoming_[index_of(guest.line())] = guest.take();
    return state != PendingPeer::State::kStranger || now >= guest.deadline();
  });
}

void RendezvousRound::throw_late() const {
  for (const TcpConnector& caller : callers_) {
    if (!caller.done()) caller.throw_late();
  }
  const auto missing = std::find(incoming_.begin(), incoming_.end(), nullptr) - incoming_.begin();
  throw TimeoutError("waited for a connection from " + rendezvous_.job_.peers + " " +
                     std::to_string(expected_[static_cast<std::size_t>(missing)].caller) + ": " +
                     text_of_socket_error(ETIMEDOUT) + " (setting comm_timeout)");
}

}  // namespace fold3d::comm
