#include "comm/tcp/transport_tcp.h"

#include "comm/p2p/frame.h"

namespace fold3d::comm {

void TcpTransport::send(Channel channel, int peer_stage, std::shared_ptr<Buffer> buffer) {
  peers_->send(channel, peer_stage, {buffer->host_data(), buffer->bytes()});
}

void TcpTransport::recv(Channel channel, int peer_stage, std::shared_ptr<Buffer> buffer) {
  peers_->recv(channel, peer_stage, {buffer->host_data(), buffer->bytes()});
}

void TcpTransport::send_frame(Channel channel, int peer_stage, std::span<const std::byte> frame) {
  peers_->send(channel, peer_stage, frame.first(used_bytes(frame)));
}

void TcpTransport::recv_frame(Channel channel, int peer_stage, std::span<std::byte> frame) {
  const auto prefix = frame.first(kFramePrefixBytes);
  peers_->recv(channel, peer_stage, prefix);
  peers_->recv(channel, peer_stage, frame.first(used_bytes(prefix)).subspan(kFramePrefixBytes));
}

void TcpTransport::send_message(Channel channel, int peer_stage, std::span<const std::byte> frame,
                                std::span<const Tensor> payload) {
  std::span<const std::byte> unsent = frame.first(used_bytes(frame));
  for (const Tensor& tensor : payload) {
    if (tensor.buffer->bytes() == 0) continue;
    peers_->send(channel, peer_stage, unsent, {tensor.buffer->host_data(), tensor.buffer->bytes()});
    unsent = {};
  }
  if (!unsent.empty()) peers_->send(channel, peer_stage, unsent);
}

}  // namespace fold3d::comm
