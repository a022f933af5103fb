#pragma once

#include <netdb.h>
#include <sys/socket.h>

#include "comm/socket/tcp_socket.h"

namespace fold3d::comm {

/// A numeric address as the system wants it.
class TcpAddress {
 public:
  /// Throws CommError when the host is no numeric address.
  explicit TcpAddress(const Endpoint& endpoint);
  ~TcpAddress() { ::freeaddrinfo(first_); }
  TcpAddress(const TcpAddress&) = delete;
  TcpAddress& operator=(const TcpAddress&) = delete;

  int family() const { return first_->ai_family; }
  const sockaddr* get() const { return first_->ai_addr; }
  socklen_t size() const { return first_->ai_addrlen; }

 private:
  addrinfo* first_ = nullptr;
};

}  // namespace fold3d::comm
