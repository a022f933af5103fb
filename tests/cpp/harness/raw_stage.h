#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "comm/rendezvous/tcp_rendezvous.h"
#include "comm/tcp/tcp_peers.h"

namespace fold3d::test {

/// Stage 1 of two without a transport: sees each byte that stage 0 sends, and sends it any bytes.
class RawStage {
 public:
  explicit RawStage(const std::string& secret) : rendezvous_("127.0.0.1", {.secret = secret}) {}

  /// Connects with the links of stage 0. Throws what they throw.
  void meet(comm::TcpPeers& first);

  void send_backward(std::span<const std::byte> bytes) const;
  /// All that stage 0 sends forward, up to where it ends the connection.
  std::vector<std::byte> recv_forward() const;

 private:
  comm::TcpRendezvous rendezvous_;
  comm::TcpRendezvous::Connections connections_;  // [channel]
};

}  // namespace fold3d::test
