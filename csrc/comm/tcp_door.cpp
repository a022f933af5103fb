#include "comm/tcp_door.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "comm/errors.h"

namespace fold3d::comm {
namespace {

constexpr char kMagic[8] = {'f', 'o', 'l', 'd', '3', 'd', 't', '1'};
constexpr std::size_t kSecretBytes = 16;  // each half
constexpr std::size_t kHelloBytes = sizeof(kMagic) + kSecretBytes + 1;
constexpr auto kHelloPatience = std::chrono::seconds(2);  // a stranger who says nothing holds up others no longer
constexpr int kBacklog = 64;

/// The resolved addresses of a numeric host.
class Addresses {
 public:
  Addresses(const Endpoint& endpoint, int flags) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags | AI_NUMERICHOST | AI_NUMERICSERV;
    const int error = ::getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(), &hints, &first_);
    if (error != 0) throw CommError("address " + endpoint.host + ": " + ::gai_strerror(error));
  }
  ~Addresses() { ::freeaddrinfo(first_); }
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;
  const addrinfo& first() const { return *first_; }

 private:
  addrinfo* first_ = nullptr;
};

void set_no_delay(int fd) {
  const int yes = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
}

using Hello = std::array<std::byte, kHelloBytes>;

Hello hello(const std::string& secret, std::size_t half, std::uint8_t line) {
  Hello out{};
  std::memcpy(out.data(), kMagic, sizeof(kMagic));
  std::memcpy(out.data() + sizeof(kMagic), secret.data() + half * kSecretBytes, kSecretBytes);
  out.back() = static_cast<std::byte>(line);
  return out;
}

Hello question(const std::string& secret, std::uint8_t line) { return hello(secret, 0, line); }
Hello answer(const std::string& secret, std::uint8_t line) { return hello(secret, 1, line); }

}  // namespace

TcpDoor::TcpDoor(const std::string& host, std::string secret) : secret_(std::move(secret)), endpoint_{host, 0} {
  if (secret_.size() < 2 * kSecretBytes) throw CommError("the secret of the links is too short");
  const Addresses addresses(endpoint_, AI_PASSIVE);
  const addrinfo& address = addresses.first();
  listener_ = std::make_unique<TcpSocket>(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::bind(listener_->fd(), address.ai_addr, address.ai_addrlen) != 0 || ::listen(listener_->fd(), kBacklog) != 0) {
    throw CommError("cannot listen on " + host + ": " + std::strerror(errno));
  }
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  ::getsockname(listener_->fd(), reinterpret_cast<sockaddr*>(&bound), &size);
  endpoint_.port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(bound).sin6_port
                                                     : reinterpret_cast<sockaddr_in&>(bound).sin_port);
}

TcpDoor::~TcpDoor() = default;

std::unique_ptr<TcpSocket> TcpDoor::call(const Endpoint& to, std::uint8_t line, Clock::time_point deadline) const {
  const Addresses addresses(to, 0);
  const addrinfo& address = addresses.first();
  auto socket = std::make_unique<TcpSocket>(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  // The peer listens already, so the system completes the connection even before the peer accepts it.
  if (::connect(socket->fd(), address.ai_addr, address.ai_addrlen) != 0 && errno != EINPROGRESS) return nullptr;
  set_no_delay(socket->fd());
  if (!socket->write(question(secret_, line), deadline)) {
    errno = ETIMEDOUT;
    return nullptr;
  }
  return socket;
}

std::unique_ptr<TcpSocket> TcpDoor::open(const std::function<bool(std::uint8_t)>& wanted, std::uint8_t& line,
                                         Clock::time_point deadline) const {
  while (listener_->ready(POLLIN, deadline)) {
    auto socket =
        std::make_unique<TcpSocket>(::accept4(listener_->fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket->fd() < 0) continue;
    Hello greeting{};
    if (!socket->read(greeting, std::min(deadline, Clock::now() + kHelloPatience))) continue;
    line = static_cast<std::uint8_t>(greeting.back());
    if (!wanted(line) || greeting != question(secret_, line)) continue;  // a stranger: closed
    set_no_delay(socket->fd());
    if (socket->write(answer(secret_, line), deadline)) return socket;
  }
  return nullptr;
}

TcpDoor::Answer TcpDoor::confirm(const TcpSocket& called, std::uint8_t line, Clock::time_point deadline) const {
  Hello got{};
  if (!called.read(got, deadline)) return Answer::kNone;
  return got == answer(secret_, line) ? Answer::kYes : Answer::kStranger;
}

}  // namespace fold3d::comm
