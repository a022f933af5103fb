#include "comm/fork_guard.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace fold3d::comm {
namespace {

struct Guarded {
  std::mutex mutex;
  std::set<int> descriptors;
};

Guarded& guarded() {
  // Never destroyed: sockets may be closed while the process ends.
  static Guarded* const all = new Guarded;
  return *all;
}

// Between fork and exec a child of a process with threads may only do what is safe in a signal handler: it walks over
// the set, which nobody was changing when it was made, and calls open, dup3 and close.
void before_fork() { guarded().mutex.lock(); }
void after_fork_in_parent() { guarded().mutex.unlock(); }
void after_fork_in_child() {
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int fd : guarded().descriptors) {
    if (nothing < 0 || ::dup3(nothing, fd, O_CLOEXEC) < 0) ::close(fd);
  }
  if (nothing >= 0) ::close(nothing);
  guarded().mutex.unlock();
}

}  // namespace

void keep_from_children(int fd) {
  static const int registered = ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  static_cast<void>(registered);
  const std::lock_guard lock(guarded().mutex);
  guarded().descriptors.insert(fd);
}

void close_guarded(int fd) {
  // Under the lock: a fork between the two would leave the connection to a child for good.
  const std::lock_guard lock(guarded().mutex);
  guarded().descriptors.erase(fd);
  ::close(fd);
}

}  // namespace fold3d::comm
