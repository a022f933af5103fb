#include "comm/socket/fork_guard.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <mutex>

namespace fold3d::comm {
namespace {

constexpr std::uint64_t kNoInode = 0;  // no socket has it

struct Guarded {
  std::mutex mutex;
  std::map<int, std::uint64_t> inodes;  // by descriptor; kNoInode where TcpSocket says when it is closed
};

Guarded& guarded() {
  // Never destroyed: sockets may be closed while the process ends.
  static Guarded* const all = new Guarded;
  return *all;
}

bool is_socket(int fd, std::uint64_t inode) {
  struct stat found{};
  return ::fstat(fd, &found) == 0 && S_ISSOCK(found.st_mode) && found.st_ino == inode;
}

// Between fork and exec a child of a process with threads may only do what is safe in a signal handler: it walks over
// the map, which nobody was changing when it was made, and calls open, fstat, dup3 and close.
void before_fork() { guarded().mutex.lock(); }
void after_fork_in_parent() { guarded().mutex.unlock(); }
void after_fork_in_child() {
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const auto& [fd, inode] : guarded().inodes) {
    if (inode != kNoInode && !is_socket(fd, inode)) continue;  // the library closed it; the number is somebody else's
    if (nothing < 0 || ::dup3(nothing, fd, O_CLOEXEC) < 0) ::close(fd);
  }
  if (nothing >= 0) ::close(nothing);
  guarded().mutex.unlock();
}

}  // namespace

void keep_from_children(int fd) { keep_from_children(fd, kNoInode); }

void keep_from_children(int fd, std::uint64_t inode) {
  static const int registered = ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  static_cast<void>(registered);
  const std::lock_guard lock(guarded().mutex);
  guarded().inodes[fd] = inode;
}

void close_guarded(int fd) {
  // Under the lock: a fork between the two would leave the connection to a child for good.
  const std::lock_guard lock(guarded().mutex);
  guarded().inodes.erase(fd);
  ::close(fd);
}

}  // namespace fold3d::comm
