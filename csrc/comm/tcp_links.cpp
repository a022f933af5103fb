#include "comm/tcp_links.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "comm/errors.h"

namespace fold3d::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr char kMagic[8] = {'f', 'o', 'l', 'd', '3', 'd', 't', '1'};
constexpr std::size_t kSecretBytes = 16;  // each half
constexpr std::size_t kHelloBytes = sizeof(kMagic) + kSecretBytes + 1;
constexpr auto kHelloPatience = std::chrono::seconds(2);  // a stranger who says nothing holds up others no longer
constexpr int kBacklog = 64;

std::string text_of(int error) { return std::strerror(error); }

int milliseconds_until(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000));
}

}  // namespace

/// Owns a file descriptor.
class TcpLinks::Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() { ::close(fd_); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  int fd() const { return fd_; }
  /// Ends blocked calls on it in any thread.
  void shutdown() const { ::shutdown(fd_, SHUT_RDWR); }

  bool ready(short events, Clock::time_point deadline) const {
    pollfd request{fd_, events, 0};
    return ::poll(&request, 1, milliseconds_until(deadline)) > 0;
  }

  /// Moves all bytes before the deadline, else returns false. For the greeting; nothing else is on the connection yet.
  template <class Span, class Call>
  bool all(Span bytes, short events, Clock::time_point deadline, Call call) const {
    while (!bytes.empty()) {
      if (!ready(events, deadline)) return false;
      const ssize_t moved = call(fd_, bytes.data(), bytes.size());
      if (moved <= 0) return false;
      bytes = bytes.subspan(static_cast<std::size_t>(moved));
    }
    return true;
  }
  bool write(std::span<const std::byte> bytes, Clock::time_point deadline) const {
    return all(bytes, POLLOUT, deadline, [](int fd, const void* data, std::size_t size) {
      return ::send(fd, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    });
  }
  bool read(std::span<std::byte> bytes, Clock::time_point deadline) const {
    return all(bytes, POLLIN, deadline,
               [](int fd, void* data, std::size_t size) { return ::recv(fd, data, size, MSG_DONTWAIT); });
  }

 private:
  const int fd_;
};

namespace {

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

std::array<std::byte, kHelloBytes> hello(const std::string& secret_half, Channel channel) {
  std::array<std::byte, kHelloBytes> out{};
  std::memcpy(out.data(), kMagic, sizeof(kMagic));
  std::memcpy(out.data() + sizeof(kMagic), secret_half.data(), kSecretBytes);
  out.back() = static_cast<std::byte>(channel);
  return out;
}

}  // namespace

TcpLinks::TcpLinks(int stage, int num_stages, const std::string& host, std::string secret)
    : stage_(stage), num_stages_(num_stages), secret_(std::move(secret)), endpoint_{host, 0} {
  if (secret_.size() < 2 * kSecretBytes) throw CommError("the secret of the links is too short");
  const Addresses addresses(endpoint_, AI_PASSIVE);
  const addrinfo& address = addresses.first();
  listener_ = std::make_unique<Socket>(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::bind(listener_->fd(), address.ai_addr, address.ai_addrlen) != 0 || ::listen(listener_->fd(), kBacklog) != 0) {
    throw CommError("cannot listen on " + host + ": " + text_of(errno));
  }
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  ::getsockname(listener_->fd(), reinterpret_cast<sockaddr*>(&bound), &size);
  endpoint_.port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(bound).sin6_port
                                                     : reinterpret_cast<sockaddr_in&>(bound).sin_port);
}

TcpLinks::~TcpLinks() = default;

void TcpLinks::connect(const Endpoint& next_endpoint, const Endpoint& previous_endpoint,
                       std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  for (const Channel channel : {Channel::kForward, Channel::kBackward}) {
    const bool forward = channel == Channel::kForward;
    const Endpoint& to = forward ? next_endpoint : previous_endpoint;
    const Addresses addresses(to, 0);
    const addrinfo& address = addresses.first();
    auto socket = std::make_unique<Socket>(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    // The peer listens already, so the system completes the connection even before the peer accepts it.
    if (::connect(socket->fd(), address.ai_addr, address.ai_addrlen) != 0 && errno != EINPROGRESS) {
      fail("could not connect to", forward ? next() : previous(), errno);
    }
    set_no_delay(socket->fd());
    if (!socket->write(hello(secret_.substr(0, kSecretBytes), channel), deadline)) {
      fail("could not connect to", forward ? next() : previous(), ETIMEDOUT);
    }
    const std::lock_guard lock(mutex_);
    outgoing_[static_cast<std::size_t>(channel)] = std::move(socket);
  }
  accept_peers(deadline);
  for (const Channel channel : {Channel::kForward, Channel::kBackward}) {
    const Socket& socket = *outgoing_[static_cast<std::size_t>(channel)];
    const auto expected = hello(secret_.substr(kSecretBytes, kSecretBytes), channel);
    std::array<std::byte, kHelloBytes> answer{};
    const int peer = channel == Channel::kForward ? next() : previous();
    if (!socket.read(answer, deadline)) fail("got no answer from", peer, ETIMEDOUT);
    if (answer != expected)
      throw ProtocolError("what listens where stage " + std::to_string(peer) + " should is a stranger");
  }
  const std::lock_guard lock(mutex_);
  listener_.reset();
  if (aborted_) throw AbortedError(reason_);
}

void TcpLinks::accept_peers(Clock::time_point deadline) {
  const auto both = [&] { return incoming_[0] && incoming_[1]; };
  while (!both()) {
    if (!listener_->ready(POLLIN, deadline)) {
      fail("waited for a connection from", incoming_[0] ? next() : previous(), ETIMEDOUT);
    }
    auto socket = std::make_unique<Socket>(::accept4(listener_->fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket->fd() < 0) continue;
    std::array<std::byte, kHelloBytes> greeting{};
    if (!socket->read(greeting, std::min(deadline, Clock::now() + kHelloPatience))) continue;
    const auto channel = static_cast<Channel>(greeting.back());
    if (channel != Channel::kForward && channel != Channel::kBackward) continue;
    auto& place = incoming_[static_cast<std::size_t>(channel)];
    if (place || greeting != hello(secret_.substr(0, kSecretBytes), channel)) continue;  // a stranger: closed
    set_no_delay(socket->fd());
    if (!socket->write(hello(secret_.substr(kSecretBytes, kSecretBytes), channel), deadline)) continue;
    const std::lock_guard lock(mutex_);
    place = std::move(socket);
  }
}

void TcpLinks::send(Channel channel, std::span<const std::byte> bytes) {
  const Socket& socket = *outgoing_[static_cast<std::size_t>(channel)];
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN) {
      pollfd request{socket.fd(), POLLOUT, 0};
      ::poll(&request, 1, -1);  // abort() shuts the socket down, which ends this
    } else if (errno != EINTR) {
      fail("lost the connection to", channel == Channel::kForward ? next() : previous(), errno);
    }
  }
}

void TcpLinks::recv(Channel channel, std::span<std::byte> bytes) {
  const Socket& socket = *incoming_[static_cast<std::size_t>(channel)];
  while (!bytes.empty()) {
    const ssize_t got = ::recv(socket.fd(), bytes.data(), bytes.size(), 0);
    if (got > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(got));
    } else if (got < 0 && errno == EAGAIN) {
      pollfd request{socket.fd(), POLLIN, 0};
      ::poll(&request, 1, -1);
    } else if (got == 0 || errno != EINTR) {
      fail("lost the connection to", channel == Channel::kForward ? previous() : next(), got == 0 ? 0 : errno);
    }
  }
}

void TcpLinks::fail(const char* what, int peer, int error) const {
  const std::lock_guard lock(mutex_);
  if (aborted_) throw AbortedError(reason_);
  const std::string text = std::string(what) + " stage " + std::to_string(peer) + ": " +
                           (error == 0 ? "closed by the peer" : text_of(error));
  if (error == ETIMEDOUT) throw TimeoutError(text + " (setting comm_timeout)");
  throw CommError(text);
}

void TcpLinks::abort(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (aborted_) return;
  aborted_ = true;
  reason_ = reason;
  for (const auto* sockets : {&outgoing_, &incoming_}) {
    for (const auto& socket : *sockets) {
      if (socket) socket->shutdown();
    }
  }
}

}  // namespace fold3d::comm
