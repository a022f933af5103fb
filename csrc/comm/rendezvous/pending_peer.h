#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <utility>

#include "comm/rendezvous/handshake.h"
#include "comm/socket/tcp_socket.h"

namespace fold3d::comm {

/// Somebody at the rendezvous: a stranger up to the proof that it is a rank of the job. Never blocks.
class PendingPeer {
 public:
  enum class State { kStranger, kKnown, kRefused };

  PendingPeer(std::unique_ptr<TcpSocket> socket, TcpSocket::Clock::time_point deadline)
      : socket_(std::move(socket)), deadline_(deadline) {}

  int fd() const { return socket_->fd(); }
  /// A stranger is patiently heard until then.
  TcpSocket::Clock::time_point deadline() const { return deadline_; }

  /// Hears what it says. `wanted`: whether a line is still to come.
  State advance(const Handshake& handshake, const std::function<bool(const ConnectionId&)>& wanted);

  /// Of a known guest.
  const ConnectionId& line() const { return greeting_.line; }
  std::unique_ptr<TcpSocket> take() { return std::move(socket_); }

 private:
  std::unique_ptr<TcpSocket> socket_;
  TcpSocket::Clock::time_point deadline_;
  std::array<std::byte, kGreetingBytes> incoming_{};
  std::size_t got_ = 0;
  bool greeted_ = false;
  Greeting greeting_;
  Nonce own_{};
};

}  // namespace fold3d::comm
