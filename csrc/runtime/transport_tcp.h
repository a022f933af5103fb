// comm::Transport for host memory: pipeline messages over TCP connections of our own, sums over c10d.
#pragma once

#include <memory>
#include <string>

#include "comm/tcp_links.h"
#include "comm/transport.h"

namespace fold3d::runtime {

/// Sends and receives over TcpLinks; sums and memory are another transport's (c10d's).
class TcpTransport final : public comm::Transport {
 public:
  TcpTransport(std::shared_ptr<comm::TcpLinks> links, std::unique_ptr<comm::Transport> collectives);

  void send(comm::Channel channel, int peer_stage, std::shared_ptr<comm::Buffer> buffer) override;
  void recv(comm::Channel channel, int peer_stage, std::shared_ptr<comm::Buffer> buffer) override;
  void send_frame(comm::Channel channel, int peer_stage, std::span<const std::byte> frame) override;
  void recv_frame(comm::Channel channel, int peer_stage, std::span<std::byte> frame) override;
  bool sends_at_once() const override { return true; }
  void all_reduce(std::shared_ptr<comm::Buffer> buffer, std::uint8_t dtype, std::size_t offset_bytes,
                  std::size_t bytes) override;
  std::shared_ptr<comm::Buffer> allocate(const comm::TensorDesc& desc) override;
  void abort(const std::string& reason) override;

 private:
  std::shared_ptr<comm::TcpLinks> links_;
  std::unique_ptr<comm::Transport> collectives_;
};

}  // namespace fold3d::runtime
