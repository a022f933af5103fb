#include "memory/copy_lane.h"

#include <pthread.h>

#include <exception>
#include <utility>

#include "comm/base/clock.h"
#include "memory/slot/tier.h"

namespace fold3d::memory {

using comm::now_ns;

CopyLane::CopyLane(const std::string& name, std::shared_ptr<CopyRate> rate)
    : name_(name), rate_(std::move(rate)), thread_([this] { loop(); }) {
  pthread_setname_np(thread_.native_handle(), name.c_str());
}

CopyLane::~CopyLane() {
  std::deque<Job> unused;  // freed after the lock is gone
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    unused.swap(jobs_);
  }
  work_.notify_all();
  done_.notify_all();
  thread_.join();
}

void CopyLane::check_locked() const {
  if (!error_.empty()) throw PoolError(error_);
}

CopyLane::Ticket CopyLane::submit(const core::Action& action, std::size_t bytes, std::function<void()> copy,
                                  std::shared_ptr<const DeviceStart> device_start) {
  Ticket ticket = 0;
  {
    const std::lock_guard lock(mutex_);
    check_locked();
    jobs_.push_back({action, bytes, std::move(copy), std::move(device_start)});
    ticket = ++submitted_;
  }
  work_.notify_one();
  return ticket;
}

bool CopyLane::is_done(Ticket ticket) const {
  const std::lock_guard lock(mutex_);
  return done_count_ >= ticket;
}

CopyLane::Ticket CopyLane::under_way() const {
  const std::lock_guard lock(mutex_);
  return done_count_ < submitted_ ? done_count_ + 1 : 0;
}

void CopyLane::wait(Ticket ticket, std::chrono::milliseconds timeout,
                    const std::function<void()>& while_waiting) const {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      const auto over = [&] { return done_count_ >= ticket || !error_.empty(); };
      done_.wait_until(lock, std::min(deadline, std::chrono::steady_clock::now() + comm::kLook), over);
      if (done_count_ >= ticket) return;
      check_locked();
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      throw PoolError("waited " + comm::seconds(timeout) + " for a copy of the lane " + name_ +
                      " (setting comm_timeout): the disk of the pool hangs, or the device does");
    }
    if (while_waiting) while_waiting();
  }
}

void CopyLane::wait_for_all(std::chrono::milliseconds timeout, const std::function<void()>& while_waiting) const {
  Ticket last = 0;
  {
    const std::lock_guard lock(mutex_);
    last = submitted_;
  }
  wait(last, timeout, while_waiting);
}

std::vector<CopyRecord> CopyLane::take_records() {
  const std::lock_guard lock(mutex_);
  return std::exchange(records_, {});
}

void CopyLane::run(Job job) {
  CopyRecord record{.action = job.action, .start_ns = now_ns(), .end_ns = 0, .bytes = job.bytes};
  std::string error;
  const std::int64_t until = rate_->take(record.start_ns, job.bytes);
  try {
    job.copy();
  } catch (const std::exception& failed) {
    error = core::to_string(job.action) + ": " + failed.what();
  }
  {
    std::unique_lock lock(mutex_);
    if (until > record.start_ns) work_.wait_until(lock, comm::time_point_of(until), [this] { return stopped_; });
  }
  job.copy = nullptr;  // whoever waits finds gone what the copy held
  std::deque<Job> unused;
  {
    const std::lock_guard lock(mutex_);
    if (error.empty()) {
      record.end_ns = now_ns();
      if (job.device_start) record.device_start = *job.device_start;
      records_.push_back(record);
      ++done_count_;
    } else if (error_.empty()) {
      error_ = error;
      unused.swap(jobs_);
    }
  }
  done_.notify_all();
}

void CopyLane::loop() {
  for (;;) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      work_.wait(lock, [this] { return stopped_ || !jobs_.empty(); });
      if (stopped_) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    run(std::move(job));
  }
}

}  // namespace fold3d::memory
