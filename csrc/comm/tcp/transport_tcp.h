#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>

#include "comm/p2p/transport.h"
#include "comm/tcp/tcp_peers.h"

namespace fold3d::comm {

/// Sends and receives host memory over TcpPeers. A receiver need not know how much comes, so only the used bytes of a
/// frame travel.
class TcpTransport final : public Transport {
 public:
  explicit TcpTransport(std::shared_ptr<TcpPeers> peers) : peers_(std::move(peers)) {}

  void send(Channel channel, int peer_stage, std::shared_ptr<Buffer> buffer) override;
  void recv(Channel channel, int peer_stage, std::shared_ptr<Buffer> buffer) override;
  void send_frame(Channel channel, int peer_stage, std::span<const std::byte> frame) override;
  void recv_frame(Channel channel, int peer_stage, std::span<std::byte> frame) override;
  /// The frame and the first tensor go to the system in one call, and so, if they are small, in one packet.
  void send_message(Channel channel, int peer_stage, std::span<const std::byte> frame,
                    std::span<const Tensor> payload) override;
  bool sends_at_once(Channel channel, int peer_stage) const override { return peers_->has_room(channel, peer_stage); }
  void abort(const std::string& reason) override { peers_->abort(reason); }

 private:
  std::shared_ptr<TcpPeers> peers_;
};

}  // namespace fold3d::comm
