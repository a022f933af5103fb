#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/arbiter/nic_arbiter.h"
#include "comm/rendezvous/tcp_rendezvous.h"
#include "comm/ring/ring_connection.h"

namespace fold3d::comm {

/// The lines of one member of a ring, over TCP: of a replica around the ring of its stage, kMostLines for
/// reduce-scatters and as many for all-gathers; of a rank among those that share the weights of the same layers, one.
/// Each has a connection to the next member and one from the previous. Only ranks that know the secret get in
/// (TcpRendezvous). One thread at a time; abort() from any.
class TcpRingPeers {
 public:
  enum class Members : std::uint8_t { kReplicas, kTensorParallel };

  /// For each kind of traffic of a replica.
  static constexpr int kMostLines = 2;

  /// Listens on a free port of `host`, a numeric address. `secret`, at least 32 characters, and `job`, what this ring
  /// is part of: the same texts on all members. Throws CommError when the address or the secret cannot be used,
  /// std::invalid_argument when there is no such member.
  TcpRingPeers(int rank, int size, const std::string& host, std::string secret, std::string job = "",
               Members members = Members::kReplicas);
  ~TcpRingPeers();

  /// Where this replica listens.
  const Endpoint& endpoint() const { return endpoint_; }

  /// Connects to the next member; `next` is where it listens. All members call. Throws what
  /// TcpRendezvous::meet() throws.
  void connect(const Endpoint& next, std::chrono::milliseconds timeout);

  /// The `index`-th line for one kind of traffic: the two of DP.sync for replicas, that of TP.sync for tensor-parallel
  /// ranks. Throws std::logic_error for others', and before connect().
  std::shared_ptr<RingConnection> connection(NicArbiter::Traffic traffic, int index = 0) const;
  /// On how many lines a replica's bucket should travel, as far as this member can tell: more than one where the
  /// round trip to the next is so long that the system's send buffer of one holds up a link of 1 Gbit/s.
  int lines_needed() const;

  /// Ends connect(), under way or to come, and later all use of the lines, with AbortedError(reason). Idempotent; the
  /// first reason stays.
  void abort(const std::string& reason) noexcept;

 private:
  class Link;

  const int rank_;
  const int size_;
  const Members members_;
  std::unique_ptr<TcpRendezvous> rendezvous_;  // until connected
  const Endpoint endpoint_;
  std::vector<std::shared_ptr<Link>> links_;  // by index and traffic

  std::mutex mutex_;  // guards what follows, rendezvous_ and links_ against abort() during connect()
  bool aborted_ = false;
  std::string reason_;
};

}  // namespace fold3d::comm
