#include "comm/tcp/transport_tcp.h"

#include "comm/p2p/frame.h"

namespace fold3d::comm {

void TcpTransport::send(Channel channel, int, std::shared_ptr<Buffer> buffer) {
  peers_->send(channel, {buffer->host_data(), buffer->bytes()});
}

void TcpTransport::recv(Channel channel, int, std::shared_ptr<Buffer> buffer) {
  peers_->recv(channel, {buffer->host_data(), buffer->bytes()});
}

void TcpTransport::send_frame(Channel channel, int, std::span<const std::byte> frame) {
  peers_->send(channel, frame.first(used_bytes(frame)));
}

void TcpTransport::recv_frame(Channel channel, int, std::span<std::byte> frame) {
  const auto prefix = frame.first(kFramePrefixBytes);
  peers_->recv(channel, prefix);
  peers_->recv(channel, frame.first(used_bytes(prefix)).subspan(kFramePrefixBytes));
}

void TcpTransport::send_message(Channel channel, int, std::span<const std::byte> frame,
                                std::span<const Tensor> payload) {
  std::span<const std::byte> unsent = frame.first(used_bytes(frame));
  for (const Tensor& tensor : payload) {
    if (tensor.buffer->bytes() == 0) continue;
    peers_->send(channel, unsent, {tensor.buffer->host_data(), tensor.buffer->bytes()});
    unsent = {};
  }
  if (!unsent.empty()) peers_->send(channel, unsent);
}

}  // namespace fold3d::comm
