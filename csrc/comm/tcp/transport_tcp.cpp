#include "comm/tcp/transport_tcp.h"

#include <utility>

#include "comm/p2p/frame.h"

namespace fold3d::comm {

TcpTransport::TcpTransport(std::shared_ptr<TcpPeers> peers, std::unique_ptr<Transport> memory)
    : links_(std::move(peers)), memory_(std::move(memory)) {}

void TcpTransport::send(Channel channel, int, std::shared_ptr<Buffer> buffer) {
  links_->send(channel, {buffer->host_data(), buffer->bytes()});
}

void TcpTransport::recv(Channel channel, int, std::shared_ptr<Buffer> buffer) {
  links_->recv(channel, {buffer->host_data(), buffer->bytes()});
}

void TcpTransport::send_frame(Channel channel, int, std::span<const std::byte> frame) {
  links_->send(channel, frame.first(used_bytes(frame)));
}

void TcpTransport::recv_frame(Channel channel, int, std::span<std::byte> frame) {
  const auto prefix = frame.first(kFramePrefixBytes);
  links_->recv(channel, prefix);
  links_->recv(channel, frame.first(used_bytes(prefix)).subspan(kFramePrefixBytes));
}

void TcpTransport::send_message(Channel channel, int, std::span<const std::byte> frame,
                                std::span<const Tensor> payload) {
  std::span<const std::byte> unsent = frame.first(used_bytes(frame));
  for (const Tensor& tensor : payload) {
    if (tensor.buffer->bytes() == 0) continue;
    links_->send(channel, unsent, {tensor.buffer->host_data(), tensor.buffer->bytes()});
    unsent = {};
  }
  if (!unsent.empty()) links_->send(channel, unsent);
}

std::shared_ptr<Buffer> TcpTransport::allocate(const TensorDesc& desc) { return memory_->allocate(desc); }

void TcpTransport::abort(const std::string& reason) {
  links_->abort(reason);
  memory_->abort(reason);
}

}  // namespace fold3d::comm
