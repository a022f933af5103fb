#include "simdevice/core/stream.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <random>
#include <thread>
#include <utility>

namespace simdevice {

namespace {

std::atomic<std::int64_t> jitter_us{0};

/// Work that follows within this time counts as queued behind.
constexpr std::chrono::milliseconds kBackToBack{1};

}  // namespace

void set_jitter(std::chrono::microseconds most) { jitter_us = most.count(); }

void Stream::push(std::unique_ptr<Task> task) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    ++pushed_count_;
    if (!started_) {
      started_ = true;
      std::thread thread([this] { loop(); });
      pthread_setname_np(thread.native_handle(), ("sim" + std::to_string(number_)).c_str());
      thread.detach();
    }
  }
  pushed_.notify_one();
}

bool Stream::wait_until_idle(std::chrono::milliseconds timeout) const {
  std::unique_lock lock(mutex_);
  const std::uint64_t last = pushed_count_;
  return completed_.wait_for(lock, timeout, [&] { return completed_count_ >= last; });
}

bool Stream::is_idle() const {
  const std::lock_guard lock(mutex_);
  return completed_count_ == pushed_count_;
}

std::string Stream::take_error() {
  const std::lock_guard lock(mutex_);
  return std::exchange(error_, {});
}

std::chrono::steady_clock::time_point Stream::free_since() const {
  const auto now = std::chrono::steady_clock::now();
  return now - busy_until_ < kBackToBack ? busy_until_ : now;
}

void Stream::occupy_until(std::chrono::steady_clock::time_point end) {
  busy_until_ = std::max(end, std::chrono::steady_clock::now());
  std::this_thread::sleep_until(end);
}

void Stream::loop() {
  std::minstd_rand random(static_cast<unsigned>(number_) + 1);
  for (;;) {
    std::unique_ptr<Task> task;
    {
      std::unique_lock lock(mutex_);
      pushed_.wait(lock, [this] { return !tasks_.empty(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    if (const std::int64_t most = jitter_us) {
      std::this_thread::sleep_for(std::chrono::microseconds(static_cast<std::int64_t>(random() % (most + 1))));
    }
    std::string error;
    try {
      task->run();
    } catch (const std::exception& failed) {
      error = failed.what();
    }
    task.reset();
    {
      const std::lock_guard lock(mutex_);
      ++completed_count_;
      if (error_.empty()) error_ = std::move(error);
    }
    completed_.notify_all();
  }
}

}  // namespace simdevice
