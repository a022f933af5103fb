#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <string>

#include "comm/host_gate.h"
#include "comm/ring_link.h"
#include "comm/tcp_door.h"

namespace fold3d::comm {

/// The lines of one replica around the ring of its stage, over TCP: one for reduce-scatters, one for all-gathers, each
/// with a connection to the next replica and one from the previous. Only ranks that know the secret get in (TcpDoor).
/// One thread at a time.
class TcpRingLinks {
 public:
  /// Listens on a free port of `host`, a numeric address. `secret`: the same text on all replicas of the stage and on
  /// nobody else, at least 32 characters. Throws CommError when the address cannot be used, std::invalid_argument when
  /// there is no such replica.
  TcpRingLinks(int rank, int size, const std::string& host, std::string secret);
  ~TcpRingLinks();

  /// Where this replica listens.
  const Endpoint& endpoint() const { return endpoint_; }

  /// Connects to the next replica; `next` is where it listens. All replicas of the stage call. Throws TimeoutError,
  /// CommError.
  void connect(const Endpoint& next, std::chrono::milliseconds timeout);

  /// The line for one kind of traffic. Throws std::logic_error before connect().
  std::shared_ptr<RingLink> link(HostGate::Traffic traffic) const;

 private:
  class Link;

  const int rank_;
  const int size_;
  std::unique_ptr<TcpDoor> door_;  // until connected
  const Endpoint endpoint_;
  std::array<std::shared_ptr<Link>, 2> links_;  // by traffic
};

}  // namespace fold3d::comm
