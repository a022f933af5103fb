#include "comm/transport_tcp.h"

#include <utility>

namespace fold3d::comm {

TcpTransport::TcpTransport(std::shared_ptr<TcpLinks> links, std::unique_ptr<Transport> memory)
    : links_(std::move(links)), memory_(std::move(memory)) {}

void TcpTransport::send(Channel channel, int, std::shared_ptr<Buffer> buffer) {
  links_->send(channel, {buffer->host_data(), buffer->bytes()});
}

void TcpTransport::recv(Channel channel, int, std::shared_ptr<Buffer> buffer) {
  links_->recv(channel, {buffer->host_data(), buffer->bytes()});
}

void TcpTransport::send_frame(Channel channel, int, std::span<const std::byte> frame) { links_->send(channel, frame); }

void TcpTransport::recv_frame(Channel channel, int, std::span<std::byte> frame) { links_->recv(channel, frame); }

std::shared_ptr<Buffer> TcpTransport::allocate(const TensorDesc& desc) { return memory_->allocate(desc); }

void TcpTransport::abort(const std::string& reason) {
  links_->abort(reason);
  memory_->abort(reason);
}

}  // namespace fold3d::comm
