#include "comm/rendezvous/tcp_connector.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "comm/base/errors.h"
#include "comm/socket/tcp_address.h"

namespace fold3d::comm {
namespace {

using namespace std::chrono_literals;

static_assert(sizeof(Nonce) == 32 && sizeof(Digest) == 32);  // what a callee sends

constexpr auto kFirstRest = 50ms, kLongestRest = 1000ms;              // between two calls
constexpr auto kFirstPatience = 1000ms, kLongestPatience = 30'000ms;  // until the system's connection counts as lost

// A rank listens before it says where, so an address that refuses will hardly change its mind: the rank has ended, or a
// firewall is between. A network may need a moment, though.
constexpr auto kFailingPatience = 3s;

/// The other end showed this one out before it was known, as doors do under a flood; or packets were lost.
bool may_pass(int error) {
  return error == TcpSocket::kClosedByPeer || error == ECONNRESET || error == EPIPE || error == ETIMEDOUT;
}

}  // namespace

TcpConnector::TcpConnector(TcpRendezvous::Call call, const Handshake& handshake, std::string peer)
    : call_(std::move(call)),
      handshake_(handshake),
      peer_(std::move(peer) + " at " + call_.to.host + ":" + std::to_string(call_.to.port)),
      wake_(Clock::now()),
      rest_(kFirstRest),
      patience_(kFirstPatience) {}

short TcpConnector::events() const { return state_ == State::kConnecting ? POLLOUT : POLLIN; }

void TcpConnector::advance() {
  if (state_ == State::kResting && Clock::now() >= wake_) call();
  if (state_ == State::kConnecting) greet();
  if (state_ == State::kGreeted) prove();
  if (state_ == State::kProved) finish();
}

void TcpConnector::call() {
  const TcpAddress address(call_.to);
  socket_ = std::make_unique<TcpSocket>(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket_->fd() < 0) return failed(errno);
  if (::connect(socket_->fd(), address.get(), address.size()) != 0 && errno != EINPROGRESS) return failed(errno);
  state_ = State::kConnecting;
  wake_ = Clock::now() + patience_;
}

void TcpConnector::greet() {
  if (!socket_->ready(POLLOUT, Clock::now())) {
    if (Clock::now() < wake_) return;
    patience_ = std::min<Clock::duration>(2 * patience_, kLongestPatience);
    return failed(ETIMEDOUT);
  }
  if (const int error = socket_->pending_error(); error != 0) return failed(error);
  socket_->set_no_delay();
  greeting_ = {.line = call_.line, .nonce = fresh_nonce()};
  if (const int error = socket_->send_now(greeting_bytes(greeting_)); error != 0) return failed(error);
  state_ = State::kGreeted;
  wake_ = Clock::time_point::max();  // the callee may come late to the meeting
}

void TcpConnector::prove() {
  if (!receive(sizeof(Nonce))) return;
  of_callee_ = incoming_;
  if (const int error = socket_->send_now(handshake_.caller_proof(greeting_, of_callee_)); error != 0) {
    return failed(error);
  }
  got_ = 0;
  state_ = State::kProved;
}

void TcpConnector::finish() {
  if (!receive(sizeof(Digest))) return;
  if (!same_digest(incoming_, handshake_.callee_proof(greeting_, of_callee_))) {
    throw ProtocolError("what listens where " + peer_ + " should is a stranger");
  }
  state_ = State::kDone;
}

bool TcpConnector::receive(std::size_t bytes) {
  const int error = socket_->recv_now(std::span(incoming_).first(bytes), got_);
  if (error != 0) failed(error);
  return error == 0 && got_ == bytes;
}

void TcpConnector::failed(int error) {
  const auto now = Clock::now();
  socket_.reset();
  state_ = State::kResting;
  got_ = 0;
  error_ = error;
  if (may_pass(error)) {
    failing_since_.reset();
  } else {
    if (!failing_since_) failing_since_ = now;
    if (now - *failing_since_ >= kFailingPatience) throw_error(error);
  }
  wake_ = now + rest_;
  rest_ = std::min<Clock::duration>(2 * rest_, kLongestRest);
}

void TcpConnector::throw_late() const {
  if (state_ == State::kResting && error_ != 0) throw_error(error_);
  if (state_ == State::kResting || state_ == State::kConnecting) throw_error(ETIMEDOUT);
  throw TimeoutError("got no answer from " + peer_ + ": " + text_of_socket_error(ETIMEDOUT) +
                     " (setting comm_timeout)");
}

void TcpConnector::throw_error(int error) const {
  const std::string text = "could not connect to " + peer_ + ": " + text_of_socket_error(error);
  if (error == ETIMEDOUT) throw TimeoutError(text + " (setting comm_timeout)");
  throw CommError(text);
}

}  // namespace fold3d::comm
