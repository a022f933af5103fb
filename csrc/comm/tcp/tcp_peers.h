#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "comm/p2p/transport.h"
#include "comm/rendezvous/tcp_rendezvous.h"
#include "comm/socket/tcp_socket.h"

namespace fold3d::comm {

/// The point-to-point peers of one stage over TCP: one connection for each way of each channel, so that none ever waits
/// for another. A channel's usual way is forward to the next stage, backward to the previous one; segments that run
/// back (core::Style::kV) also take the ways against these. Blocking calls in host memory.
///
/// Only stages that know the job's secret get in (TcpRendezvous).
///
/// Threads: as comm::Transport says; abort() from any thread.
class TcpPeers {
 public:
  /// Listens on a free port of `host`. `secret`, at least 32 characters, and `job`, what these peers are part of: the
  /// same texts on all stages. Throws CommError when the address or the secret cannot be used.
  TcpPeers(int stage, int num_stages, const std::string& host, std::string secret, std::string job = "");
  ~TcpPeers();
  TcpPeers(const TcpPeers&) = delete;
  TcpPeers& operator=(const TcpPeers&) = delete;

  /// Where this stage listens.
  const Endpoint& endpoint() const { return endpoint_; }

  /// Connects to the neighbours: `next` is where stage + 1 listens, `previous` stage - 1, both modulo num_stages.
  /// `both_ways`: also the ways against the channels' usual ones; with two stages these are the same. All stages call.
  /// Throws what TcpRendezvous::meet() throws.
  void connect(const Endpoint& next, const Endpoint& previous, std::chrono::milliseconds timeout,
               bool both_ways = false);

  /// Sends `first`, then `second`, to a neighbour. Returns when what is left takes about a millisecond.
  void send(Channel channel, int peer, std::span<const std::byte> first, std::span<const std::byte> second = {});
  /// Whether a few kilobytes could be sent to this neighbour without waiting for it.
  bool has_room(Channel channel, int peer) const;
  /// Fills `bytes` from a neighbour.
  void recv(Channel channel, int peer, std::span<std::byte> bytes);

  int next() const { return (stage_ + 1) % num_stages_; }
  int previous() const { return (stage_ + num_stages_ - 1) % num_stages_; }

  /// Ends every blocked and later call with AbortedError(reason). Idempotent; the first reason stays.
  void abort(const std::string& reason) noexcept;

 private:
  static constexpr std::size_t kWays = 4;  // of either channel, the usual one and the one against it

  [[noreturn]] void fail(const char* what, int peer, int error) const;
  std::size_t way_to(Channel channel, int peer) const;
  std::size_t way_from(Channel channel, int peer) const;

  const int stage_;
  const int num_stages_;
  std::unique_ptr<TcpRendezvous> rendezvous_;  // until connected
  const Endpoint endpoint_;
  std::array<std::unique_ptr<TcpSocket>, kWays> outgoing_, incoming_;
  std::array<std::size_t, kWays> waiting_;  // what send() leaves unsent; its thread only

  mutable std::mutex mutex_;  // guards what follows, rendezvous_ and the sockets against abort() during connect()
  bool aborted_ = false;
  std::string reason_;
};

}  // namespace fold3d::comm
