#include "comm/arbiter/message_watch.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "comm/arbiter/poll_period.h"

namespace fold3d::comm {
namespace {

/// Between two looks at most: of the slices of a millisecond hardly one more leaves before a message that is ready.
constexpr std::chrono::microseconds kLongestPause{500};
/// What comes late by an eighth of a slice costs less than looking more often.
constexpr std::chrono::milliseconds kSlice{1};

bool holds(const std::function<bool()>& question) {
  try {
    return question();
  } catch (const std::exception&) {
    return true;
  }
}

}  // namespace

MessageWatch::MessageWatch(std::shared_ptr<NicArbiter> arbiter)
    : arbiter_(std::move(arbiter)), thread_([this] { loop(); }) {
  pthread_setname_np(thread_.native_handle(), "message_watch");
}

MessageWatch::~MessageWatch() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_one();
  thread_.join();
  for (const Line& line : lines_) {
    if (line.is_pending) arbiter_->message_ends(line.transits.front().direction);
  }
}

void MessageWatch::push(std::size_t line, Transit transit) {
  {
    const std::lock_guard lock(mutex_);
    lines_.at(line).transits.push_back(std::move(transit));
  }
  changed_.notify_one();
}

void MessageWatch::loop() {
  std::unique_lock lock(mutex_);
  const auto is_idle = [&] {
    return std::ranges::all_of(lines_, [](const Line& line) { return line.transits.empty(); });
  };
  PollPeriod period(kSlice, kLongestPause);
  while (!stopped_) {
    if (is_idle()) {
      changed_.wait(lock, [&] { return stopped_ || !is_idle(); });
      period.restart();
    }
    for (Line& line : lines_) {
      if (look(line, lock)) period.restart();  // more often follows soon
    }
    if (!is_idle()) changed_.wait_for(lock, period.next(), [&] { return stopped_; });
  }
}

void MessageWatch::begins(const Transit& transit) {
  arbiter_->message_begins(transit.direction, transit.bytes);
  if (transit.when_ready) transit.when_ready();
}

/// Returns whether anything came. Without the lock where the device is asked. Others only add to the end of the line,
/// so its first ones stay where they are.
bool MessageWatch::look(Line& line, std::unique_lock<std::mutex>& lock) {
  bool is_news = false;
  while (!stopped_ && !line.transits.empty()) {
    const Transit& first = line.transits.front();
    const Transit* const second = line.transits.size() > 1 ? &line.transits[1] : nullptr;
    lock.unlock();
    if (!line.is_pending && holds(first.is_ready)) {
      begins(first);
      line.is_pending = is_news = true;
    }
    const bool is_through = line.is_pending && holds(first.is_through);
    if (is_through) {
      // Before the other ends, so that no slice finds a gap between the two.
      line.is_pending = second != nullptr && holds(second->is_ready);
      if (line.is_pending) begins(*second);
      arbiter_->message_ends(first.direction);
    }
    lock.lock();
    if (!is_through) return is_news;
    is_news = true;
    Transit over = std::move(line.transits.front());
    line.transits.pop_front();
    lock.unlock();
    over = {};  // without the lock: freeing a tensor may have to wait for the interpreter
    lock.lock();
  }
  return is_news;
}

}  // namespace fold3d::comm
