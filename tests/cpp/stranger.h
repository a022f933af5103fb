#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "comm/tcp_socket.h"

namespace fold3d::test {

/// A program that knows nothing of the job: connects to where a rank listens and says what no rank would say.
class Stranger {
 public:
  /// Throws std::runtime_error when it does not get as far.
  explicit Stranger(const comm::Endpoint& listener) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(listener.port));
    if (::inet_pton(AF_INET, listener.host.c_str(), &address.sin_addr) != 1 ||
        ::connect(socket_.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
      throw std::runtime_error("the stranger could not connect");
    }
    std::array<std::byte, 100> noise{};
    noise.fill(std::byte{'x'});
    if (socket_.send_all(noise) != 0) throw std::runtime_error("the stranger could not speak");
  }

  /// Whether it was shown out without a word; blocks until it was, or was told something.
  bool was_refused() const {
    std::array<std::byte, 1> byte{};
    return socket_.recv_all(byte) != 0;
  }

 private:
  comm::TcpSocket socket_;
};

}  // namespace fold3d::test
