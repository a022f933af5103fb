#include "runtime/transport_tcp.h"

#include <utility>

namespace fold3d::runtime {

TcpTransport::TcpTransport(std::shared_ptr<comm::TcpLinks> links, std::unique_ptr<comm::Transport> collectives)
    : links_(std::move(links)), collectives_(std::move(collectives)) {}

void TcpTransport::send(comm::Channel channel, int, std::shared_ptr<comm::Buffer> buffer) {
  links_->send(channel, {buffer->host_data(), buffer->bytes()});
}

void TcpTransport::recv(comm::Channel channel, int, std::shared_ptr<comm::Buffer> buffer) {
  links_->recv(channel, {buffer->host_data(), buffer->bytes()});
}

void TcpTransport::send_frame(comm::Channel channel, int, std::span<const std::byte> frame) {
  links_->send(channel, frame);
}

void TcpTransport::recv_frame(comm::Channel channel, int, std::span<std::byte> frame) { links_->recv(channel, frame); }

void TcpTransport::all_reduce(std::shared_ptr<comm::Buffer> buffer, std::uint8_t dtype, std::size_t offset_bytes,
                              std::size_t bytes) {
  collectives_->all_reduce(std::move(buffer), dtype, offset_bytes, bytes);
}

std::shared_ptr<comm::Buffer> TcpTransport::allocate(const comm::TensorDesc& desc) {
  return collectives_->allocate(desc);
}

void TcpTransport::abort(const std::string& reason) {
  links_->abort(reason);
  collectives_->abort(reason);
}

}  // namespace fold3d::runtime
