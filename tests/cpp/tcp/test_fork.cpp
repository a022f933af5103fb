// Forked children, and the sockets and threads of their parent.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "comm/arbiter/own_process.h"
#include "comm/p2p/transfer_queue.h"
#include "comm/socket/fork_guard.h"
#include "comm/socket/tcp_socket.h"
#include "memory/copy_lane.h"
#include "memory/copy_rate.h"

namespace fold3d::test {
namespace {

using namespace std::chrono_literals;
using comm::TcpSocket;

/// Two ends of a connection. `theirs` is no TcpSocket until it is made one.
std::array<int, 2> connection() {
  std::array<int, 2> ends{};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
  return ends;
}

/// A child that does nothing until it is killed.
class Sleeper {
 public:
  Sleeper() : child_(::fork()) {
    if (child_ == 0) {
      for (;;) ::pause();
    }
  }
  ~Sleeper() {
    ::kill(child_, SIGKILL);
    ::waitpid(child_, nullptr, 0);
  }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

 private:
  const pid_t child_;
};

TEST(Fork, AConnectionEndsWithItsOwnerThoughChildrenLive) {
  // A worker of a data loader outlives its rank by seconds. Here the rank only closes; the child must not keep it open.
  const auto [near, far] = connection();
  const TcpSocket peer(near);
  auto owner = std::make_unique<TcpSocket>(far);
  const Sleeper worker;
  owner.reset();
  EXPECT_TRUE(peer.ready(POLLIN, TcpSocket::Clock::now() + 5s)) << "the child holds the connection";
  std::array<std::byte, 1> byte{};
  if (!HasFailure()) {
    EXPECT_EQ(peer.recv_all(byte), TcpSocket::kClosedByPeer);
  }
}

TEST(Fork, TheParentsConnectionsGoOn) {
  const auto [near, far] = connection();
  const TcpSocket one(near), other(far);
  const Sleeper worker;
  const std::array<std::byte, 3> sent{std::byte{1}, std::byte{2}, std::byte{3}};
  ASSERT_EQ(one.send_all(sent), 0);
  std::array<std::byte, 3> got{};
  ASSERT_EQ(other.recv_all(got), 0);
  EXPECT_EQ(got, sent);
}

TEST(Fork, AChildsOwnFilesAreSafeFromTheParentsObjects) {
  const auto [near, far] = connection();
  auto one = std::make_unique<TcpSocket>(near);
  const TcpSocket other(far);
  const pid_t child = ::fork();
  if (child == 0) {
    const int own = ::open("/dev/zero", O_RDONLY);
    one.reset();  // as a garbage collector in the child might
    char byte = 1;
    ::_exit(::read(own, &byte, 1) == 1 && byte == 0 && own != near ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_FALSE(other.ready(POLLIN, TcpSocket::Clock::now())) << "the child ended its parent's connection";
}

TEST(Fork, ALibrarysConnectionEndsWithItToo) {
  const auto [near, far] = connection();
  const TcpSocket peer(near);
  struct stat found{};
  ASSERT_EQ(::fstat(far, &found), 0);
  comm::keep_from_children(far, found.st_ino);
  const Sleeper worker;
  ::close(far);
  EXPECT_TRUE(peer.ready(POLLIN, TcpSocket::Clock::now() + 5s)) << "the child holds the connection";
}

TEST(Fork, WhatTookTheNumberOfALibrarysConnectionIsLeftAlone) {
  const auto [near, far] = connection();
  struct stat found{};
  ASSERT_EQ(::fstat(far, &found), 0);
  comm::keep_from_children(far, found.st_ino);
  ::close(far);
  const std::array<int, 2> others = connection();
  ASSERT_EQ(others[0], far) << "numbers are given from below";
  const pid_t child = ::fork();
  if (child == 0) {
    char byte = 7;
    ::_exit(::write(others[0], &byte, 1) == 1 && ::read(others[1], &byte, 1) == 1 && byte == 7 ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  for (const int fd : {near, others[0], others[1]}) ::close(fd);
}

TEST(Fork, AChildLeavesItsParentsThreadsAlone) {
  // They do not run there: to join one never ends, nor does destroying a condition that one waits for.
  auto queue = comm::make_for_process<comm::TransferQueue>("queue", [](std::size_t) {});
  auto lane = comm::make_for_process<memory::CopyLane>("lane", std::make_shared<memory::CopyRate>(0.0));
  queue->start(2);
  queue->raise(1);
  ASSERT_EQ(queue->wait(1, comm::TransferQueue::Clock::now() + 60s), comm::TransferQueue::Outcome::kDone);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    queue.reset();
    lane.reset();
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  queue->raise(2);
  EXPECT_EQ(queue->wait(2, comm::TransferQueue::Clock::now() + 60s), comm::TransferQueue::Outcome::kDone);
}

TEST(Fork, ForksWhileOthersConnect) {
  std::atomic<bool> enough = false;
  std::thread busy([&] {
    while (!enough) {
      const auto [near, far] = connection();
      const TcpSocket one(near), other(far);
    }
  });
  for (int i = 0; i < 20; ++i) const Sleeper worker;
  enough = true;
  busy.join();
}

}  // namespace
}  // namespace fold3d::test
