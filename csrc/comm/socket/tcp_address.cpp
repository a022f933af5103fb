#include "comm/socket/tcp_address.h"

#include <string>

#include "comm/base/errors.h"

namespace fold3d::comm {

TcpAddress::TcpAddress(const Endpoint& endpoint) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  const int error = ::getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(), &hints, &first_);
  if (error != 0) throw CommError("address " + endpoint.host + ": " + ::gai_strerror(error));
}

}  // namespace fold3d::comm
