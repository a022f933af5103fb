#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "comm/rendezvous/handshake.h"
#include "comm/rendezvous/tcp_rendezvous.h"
#include "comm/socket/tcp_socket.h"

namespace fold3d::comm {

/// One call at another rank's rendezvous, up to the proof that the rank is one of the job. Never blocks; calls again
/// where a failure may pass.
class TcpConnector {
 public:
  using Clock = TcpSocket::Clock;

  /// `peer`: what the rank is called in errors.
  TcpConnector(TcpRendezvous::Call call, const Handshake& handshake, std::string peer);

  bool done() const { return state_ == State::kDone; }
  /// Its connection, once done.
  std::unique_ptr<TcpSocket> take() { return std::move(socket_); }

  /// What to poll for; -1 for nothing.
  int fd() const { return socket_ && !done() ? socket_->fd() : -1; }
  short events() const;
  /// When to advance() whatever the poll says.
  Clock::time_point wake() const { return wake_; }

  /// Goes on as far as possible. Throws ProtocolError when a stranger answers, CommError when calling again is vain.
  void advance();

  /// Throws what to say when there is no more time.
  [[noreturn]] void throw_late() const;

 private:
  enum class State { kResting, kConnecting, kGreeted, kProved, kDone };

  void call();
  void greet();
  void prove();
  void finish();
  /// Fills `incoming_` with `bytes` bytes. Whether they are all there.
  bool receive(std::size_t bytes);
  void failed(int error);
  [[noreturn]] void throw_error(int error) const;

  const TcpRendezvous::Call call_;
  const Handshake& handshake_;
  const std::string peer_;

  State state_ = State::kResting;
  Clock::time_point wake_;
  Clock::duration rest_, patience_;
  std::unique_ptr<TcpSocket> socket_;
  Greeting greeting_;
  Nonce of_callee_{};
  std::array<std::byte, 32> incoming_{};
  std::size_t got_ = 0;
  int error_ = 0;  // of the last attempt
  std::optional<Clock::time_point> failing_since_;
};

}  // namespace fold3d::comm
