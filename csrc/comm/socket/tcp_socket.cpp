#include "comm/socket/tcp_socket.h"

#include <linux/sock_diag.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <utility>

#include "comm/socket/fork_guard.h"

namespace fold3d::comm {
namespace {

constexpr int kBufferLock = 72;  // SO_BUF_LOCK, which older headers do not have

int milliseconds_until(TcpSocket::Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - TcpSocket::Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000));
}

void wait_for(int fd, short events) {
  pollfd request{fd, events, 0};
  ::poll(&request, 1, -1);  // shutdown() ends this
}

}  // namespace

TcpSocket::TcpSocket(int fd) : fd_(fd) {
  if (fd_ >= 0) keep_from_children(fd_);
}

TcpSocket::~TcpSocket() {
  if (fd_ >= 0) close_guarded(fd_);
}

void TcpSocket::shutdown() const { ::shutdown(fd_, SHUT_RDWR); }

bool TcpSocket::ready(short events, Clock::time_point deadline) const {
  for (;;) {
    pollfd request{fd_, events, 0};
    const int found = ::poll(&request, 1, milliseconds_until(deadline));
    if (found > 0) return true;
    const bool interrupted = found < 0 && errno == EINTR;
    if (!interrupted && Clock::now() >= deadline) return false;
  }
}

int TcpSocket::send_now(std::span<const std::byte> bytes) const {
  const ssize_t sent = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) return errno;
  return static_cast<std::size_t>(sent) == bytes.size() ? 0 : ENOBUFS;
}

int TcpSocket::recv_now(std::span<std::byte> bytes, std::size_t& got) const {
  while (got < bytes.size()) {
    const ssize_t moved = ::recv(fd_, bytes.data() + got, bytes.size() - got, MSG_DONTWAIT);
    if (moved == 0) return kClosedByPeer;
    if (moved < 0 && errno == EAGAIN) return 0;
    if (moved < 0 && errno != EINTR) return errno;
    if (moved > 0) got += static_cast<std::size_t>(moved);
  }
  return 0;
}

int TcpSocket::pending_error() const {
  int error = 0;
  socklen_t size = sizeof(error);
  return ::getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

void TcpSocket::set_no_delay() const {
  const int yes = 1;
  ::setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
}

void TcpSocket::give_up_after(Clock::duration silence) const {
  using std::chrono::milliseconds;
  constexpr int kProbes = 4, kYes = 1;
  constexpr std::int64_t kLeast = 1000, kMost = 32'000'000;  // which the system takes for each of them
  const std::int64_t least = std::chrono::duration_cast<milliseconds>(silence).count();
  const int total = static_cast<int>(std::clamp(least, kLeast, kMost));
  const int idle = std::max(1, total / 2000), interval = std::max(1, total / 2000 / kProbes);  // seconds
  ::setsockopt(fd_, IPPROTO_TCP, TCP_USER_TIMEOUT, &total, sizeof(total));
  ::setsockopt(fd_, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle));
  ::setsockopt(fd_, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof(interval));
  ::setsockopt(fd_, IPPROTO_TCP, TCP_KEEPCNT, &kProbes, sizeof(kProbes));
  ::setsockopt(fd_, SOL_SOCKET, SO_KEEPALIVE, &kYes, sizeof(kYes));
}

int TcpSocket::send_all(std::span<const std::byte> first, std::span<const std::byte> second) const {
  while (!first.empty() || !second.empty()) {
    // The system looks at its limit only where a new packet begins, and one may have 64 KiB.
    const std::size_t piece = most_waiting_ == 0 ? second.size() : std::min(second.size(), at_once_);
    if (most_waiting_ != 0 && second.size() > most_waiting_) wait_for(fd_, POLLOUT);
    std::array<iovec, 2> parts{iovec{const_cast<std::byte*>(first.data()), first.size()},
                               iovec{const_cast<std::byte*>(second.data()), piece}};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    const bool fills_packets = piece < second.size() && fills_packets_;
    const ssize_t sent = ::sendmsg(fd_, &message, MSG_NOSIGNAL | (fills_packets ? MSG_MORE : 0));
    if (sent >= 0) {
      const std::size_t of_first = std::min(first.size(), static_cast<std::size_t>(sent));
      first = first.subspan(of_first);
      second = second.subspan(static_cast<std::size_t>(sent) - of_first);
    } else if (errno == EAGAIN) {
      wait_for(fd_, POLLOUT);
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

int TcpSocket::recv_all(std::span<std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t got = ::recv(fd_, bytes.data(), bytes.size(), 0);
    if (got > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(got));
    } else if (got == 0) {
      return kClosedByPeer;
    } else if (errno == EAGAIN) {
      wait_for(fd_, POLLIN);
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

TcpSocket::Progress TcpSocket::progress() const {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (::getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {};
  if (size < offsetof(tcp_info, tcpi_min_rtt) + sizeof(info.tcpi_min_rtt)) return {};  // before Linux 4.6
  return {.is_known = true,
          .acknowledged = info.tcpi_bytes_acked,
          .waiting = info.tcpi_notsent_bytes,
          .is_empty = info.tcpi_unacked == 0 && info.tcpi_notsent_bytes == 0,
          .round_trip_seconds = static_cast<double>(info.tcpi_min_rtt) * 1e-6};
}

std::size_t TcpSocket::segment_bytes() const {
  int bytes = 0;
  socklen_t size = sizeof(bytes);
  if (::getsockopt(fd_, IPPROTO_TCP, TCP_MAXSEG, &bytes, &size) != 0) return 0;
  return static_cast<std::size_t>(bytes);
}

void TcpSocket::limit_window(std::size_t bytes) {
  constexpr std::size_t kNoLimit = 1u << 30;
  window_ = bytes == 0 ? 0 : std::clamp(bytes, 4 * segment_bytes(), kNoLimit);
  const int value = static_cast<int>(window_ == 0 ? kNoLimit : window_);
  ::setsockopt(fd_, IPPROTO_TCP, TCP_WINDOW_CLAMP, &value, sizeof(value));
}

void TcpSocket::close_window() {
  if (window_ == 0 || closed_buffer_ != 0) return;
  std::array<std::uint32_t, SK_MEMINFO_VARS> memory{};
  socklen_t size = sizeof(memory);
  if (::getsockopt(fd_, SOL_SOCKET, SO_MEMINFO, memory.data(), &size) != 0) return;
  const std::size_t buffer = memory[SK_MEMINFO_RCVBUF];
  if (buffer > 2 * most_buffer()) return;
  // What is on its way still fits: packets take more memory than they carry.
  const std::size_t needed = memory[SK_MEMINFO_RMEM_ALLOC] + memory[SK_MEMINFO_BACKLOG] + 3 * window_;
  if (needed >= buffer) return;
  closed_buffer_ = buffer;
  set_buffer(needed);
}

void TcpSocket::open_window() {
  if (closed_buffer_ == 0) return;
  set_buffer(std::exchange(closed_buffer_, 0));
  const int by_system = 0;  // it grows again as the system likes
  ::setsockopt(fd_, SOL_SOCKET, kBufferLock, &by_system, sizeof(by_system));
}

void TcpSocket::set_buffer(std::size_t bytes) const {
  const int value = static_cast<int>(bytes / 2);  // which the system doubles
  ::setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &value, sizeof(value));
}

std::size_t TcpSocket::most_buffer() const {
  static const std::size_t most = [this] {
    int locked = 0;
    socklen_t size = sizeof(locked);
    std::size_t allowed = 0;
    if (::getsockopt(fd_, SOL_SOCKET, kBufferLock, &locked, &size) != 0) return allowed;  // before Linux 5.14
    std::ifstream("/proc/sys/net/core/rmem_max") >> allowed;
    return allowed;
  }();
  return most;
}

void TcpSocket::limit_waiting(std::size_t bytes, std::size_t at_once) {
  most_waiting_ = bytes;
  at_once_ = std::max(bytes, at_once);
  fills_packets_ = 2 * segment_bytes() < bytes;
  const int value = static_cast<int>(bytes);
  ::setsockopt(fd_, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &value, sizeof(value));
}

std::string text_of_socket_error(int error) {
  return error == TcpSocket::kClosedByPeer ? "closed by the peer" : std::strerror(error);
}

}  // namespace fold3d::comm
