#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "comm/socket/tcp_socket.h"

namespace fold3d::test {

/// A program that knows nothing of the job: connects to where a rank listens and says what no rank would say.
class Stranger {
 public:
  /// Says so many bytes. Throws std::runtime_error when it does not get as far.
  explicit Stranger(const comm::Endpoint& listener, std::size_t bytes = 100)
      : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(listener.port));
    if (::inet_pton(AF_INET, listener.host.c_str(), &address.sin_addr) != 1 ||
        ::connect(socket_.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
      throw std::runtime_error("the stranger could not connect");
    }
    say(std::vector<std::byte>(bytes, std::byte{'x'}));
  }

  void say(std::span<const std::byte> bytes) const {
    if (socket_.send_all(bytes) != 0) throw std::runtime_error("the stranger could not speak");
  }

  /// Fills `bytes`; false when it was shown out before.
  bool hears(std::span<std::byte> bytes) const { return socket_.recv_all(bytes) == 0; }

  /// Whether it was shown out without a word; blocks until it was, or was told something.
  bool was_refused() const {
    std::array<std::byte, 1> byte{};
    return socket_.recv_all(byte) != 0;
  }

 private:
  comm::TcpSocket socket_;
};

}  // namespace fold3d::test
