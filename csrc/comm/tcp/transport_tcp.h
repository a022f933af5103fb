#pragma once

#include <memory>
#include <span>
#include <string>

#include "comm/p2p/transport.h"
#include "comm/tcp/tcp_peers.h"

namespace fold3d::comm {

/// Sends and receives over TcpPeers, into memory of another transport (c10d's). A receiver need not know how much
/// comes, so only the used bytes of a frame travel.
class TcpTransport final : public Transport {
 public:
  TcpTransport(std::shared_ptr<TcpPeers> peers, std::unique_ptr<Transport> memory);

  void send(Channel channel, int peer_stage, std::shared_ptr<Buffer> buffer) override;
  void recv(Channel channel, int peer_stage, std::shared_ptr<Buffer> buffer) override;
  void send_frame(Channel channel, int peer_stage, std::span<const std::byte> frame) override;
  void recv_frame(Channel channel, int peer_stage, std::span<std::byte> frame) override;
  /// The frame and the first tensor go to the system in one call, and so, if they are small, in one packet.
  void send_message(Channel channel, int peer_stage, std::span<const std::byte> frame,
                    std::span<const Tensor> payload) override;
  bool sends_at_once(Channel channel) const override { return links_->has_room(channel); }
  void check(const TensorDesc& desc) const override { memory_->check(desc); }
  std::shared_ptr<Buffer> allocate(const TensorDesc& desc) override;
  void abort(const std::string& reason) override;

 private:
  std::shared_ptr<TcpPeers> links_;
  std::unique_ptr<Transport> memory_;
};

}  // namespace fold3d::comm
