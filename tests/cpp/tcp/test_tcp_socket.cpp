// What a TCP socket lets its peer send while nobody reads.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstddef>
#include <fstream>
#include <vector>

#include "comm/socket/tcp_socket.h"

namespace fold3d::test {
namespace {

using comm::TcpSocket;

constexpr int kSegment = 1448;  // as on Ethernet; the loopback's are 64 KiB
constexpr std::size_t kWindow = 16u << 10;

int opened(bool listens) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_EQ(::setsockopt(fd, IPPROTO_TCP, TCP_MAXSEG, &kSegment, sizeof(kSegment)), 0);
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (listens) {
    EXPECT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&any), sizeof(any)), 0);
    EXPECT_EQ(::listen(fd, 1), 0);
  }
  return fd;
}

int connected_to(const TcpSocket& listener) {
  sockaddr_in where{};
  socklen_t size = sizeof(where);
  EXPECT_EQ(::getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&where), &size), 0);
  const int fd = opened(false);
  EXPECT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&where), size), 0);
  return fd;
}

struct Connection {
  TcpSocket listener{opened(true)};
  TcpSocket sender{connected_to(listener)};
  TcpSocket reader{::accept(listener.fd(), nullptr, nullptr)};

  /// Sends until nothing moves any more; returns the bytes that lie with the reader, who has read all before.
  std::size_t fill() const {
    const std::vector<std::byte> bytes(64u << 10);
    const std::size_t before = sender.progress().acknowledged;
    for (pollfd request{sender.fd(), POLLOUT, 0}; ::poll(&request, 1, 100) > 0;) {
      ::send(sender.fd(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    return sender.progress().acknowledged - before;
  }

  /// Reads all that comes; returns how much that was.
  std::size_t drain() const {
    std::vector<std::byte> bytes(64u << 10);
    std::size_t got = 0;
    for (pollfd request{reader.fd(), POLLIN, 0}; ::poll(&request, 1, 100) > 0;) {
      const ssize_t now = ::recv(reader.fd(), bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (now <= 0) break;
      got += static_cast<std::size_t>(now);
    }
    return got;
  }
};

bool takes_buffers_back() {
  constexpr int kBufferLock = 72;
  const TcpSocket socket(::socket(AF_INET, SOCK_STREAM, 0));
  int locked = 0;
  socklen_t size = sizeof(locked);
  std::size_t allowed = 0;
  std::ifstream("/proc/sys/net/core/rmem_max") >> allowed;
  return ::getsockopt(socket.fd(), SOL_SOCKET, kBufferLock, &locked, &size) == 0 && allowed >= kWindow;
}

TEST(TcpSocketWindow, ClosesWhileNobodyReads) {
  if (!takes_buffers_back()) GTEST_SKIP() << "this system does not take receive buffers back";
  Connection connection;
  connection.reader.limit_window(kWindow);
  connection.reader.close_window();
  const std::size_t held = connection.fill();
  EXPECT_LE(held, 5 * kWindow);  // a connection begins with a window of four of ours, which is not taken back
  connection.reader.open_window();
  EXPECT_GT(connection.drain(), 2 * held);  // what waited comes
  EXPECT_GT(connection.fill(), 5 * kWindow);
}

TEST(TcpSocketWindow, StaysTheSystemsWithoutALimit) {
  Connection connection;
  connection.reader.close_window();
  EXPECT_GT(connection.fill(), 5 * kWindow);
  connection.reader.open_window();
  EXPECT_GT(connection.drain(), 5 * kWindow);
}

}  // namespace
}  // namespace fold3d::test
