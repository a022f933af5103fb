#include "simdevice/device/left_out.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace simdevice {

namespace {

constexpr std::array<std::pair<const char*, Ordering>, 6> kNames = {{{"event_block", Ordering::kEventBlock},
                                                                     {"event_synchronize", Ordering::kEventSynchronize},
                                                                     {"event_query", Ordering::kEventQuery},
                                                                     {"record_stream", Ordering::kRecordStream},
                                                                     {"work_wait", Ordering::kWorkWait},
                                                                     {"news", Ordering::kNews}}};

struct LeftOut {
  std::mutex mutex;
  Ordering ordering = Ordering::kEventBlock;
  std::string thread;
  std::atomic<bool> active{false};
  std::atomic<std::int64_t> count{0};
};

LeftOut& left_out() {
  static LeftOut& one = *new LeftOut;  // threads outlive the end of main
  return one;
}

std::string name_of_thread() {
  if (gettid() == getpid()) return "main";
  std::array<char, 16> name{};
  pthread_getname_np(pthread_self(), name.data(), name.size());
  return name.data();
}

}  // namespace

void leave_out(const std::string& ordering, const std::string& thread) {
  for (const auto& [name, value] : kNames) {
    if (ordering != name) continue;
    LeftOut& one = left_out();
    const std::lock_guard lock(one.mutex);
    one.ordering = value;
    one.thread = thread;
    one.count = 0;
    one.active = true;
    return;
  }
  throw std::invalid_argument("there is no ordering " + ordering);
}

std::int64_t leave_nothing_out() {
  left_out().active = false;
  return left_out().count;
}

bool is_left_out(Ordering ordering) {
  LeftOut& one = left_out();
  if (!one.active) return false;
  const std::lock_guard lock(one.mutex);
  if (one.ordering != ordering || one.thread != name_of_thread()) return false;
  ++one.count;
  return true;
}

}  // namespace simdevice
