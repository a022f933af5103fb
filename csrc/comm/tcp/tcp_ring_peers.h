#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>

#include "comm/arbiter/nic_arbiter.h"
#include "comm/rendezvous/tcp_rendezvous.h"
#include "comm/ring/ring_connection.h"

namespace fold3d::comm {

/// The lines of one replica around the ring of its stage, over TCP: one for reduce-scatters, one for all-gathers, each
/// with a connection to the next replica and one from the previous. Only ranks that know the secret get in
/// (TcpRendezvous). One thread at a time; abort() from any.
class TcpRingPeers {
 public:
  /// Listens on a free port of `host`, a numeric address. `secret`, at least 32 characters, and `job`, what this ring
  /// is part of: the same texts on all replicas of the stage. Throws CommError when the address or the secret cannot be
  /// used, std::invalid_argument when there is no such replica.
  TcpRingPeers(int rank, int size, const std::string& host, std::string secret, std::string job = "");
  ~TcpRingPeers();

  /// Where this replica listens.
  const Endpoint& endpoint() const { return endpoint_; }

  /// Connects to the next replica; `next` is where it listens. All replicas of the stage call. Throws what
  /// TcpRendezvous::meet() throws.
  void connect(const Endpoint& next, std::chrono::milliseconds timeout);

  /// The line for one kind of traffic. Throws std::logic_error before connect().
  std::shared_ptr<RingConnection> connection(NicArbiter::Traffic traffic) const;

  /// Ends connect(), under way or to come, and later all use of the lines, with AbortedError(reason). Idempotent; the
  /// first reason stays.
  void abort(const std::string& reason) noexcept;

 private:
  class Link;

  const int rank_;
  const int size_;
  std::unique_ptr<TcpRendezvous> rendezvous_;  // until connected
  const Endpoint endpoint_;
  std::array<std::shared_ptr<Link>, 2> links_;  // by traffic

  std::mutex mutex_;  // guards what follows, rendezvous_ and links_ against abort() during connect()
  bool aborted_ = false;
  std::string reason_;
};

}  // namespace fold3d::comm
