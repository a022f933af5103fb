#include "comm/p2p/transfer_queue.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

namespace fold3d::comm {

TransferQueue::TransferQueue(const std::string& name, std::function<void(std::size_t)> run)
    : run_(std::move(run)), thread_([this] { loop(); }) {
  pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());
}

TransferQueue::~TransferQueue() {
  stop();
  thread_.join();
}

void TransferQueue::start(std::size_t total) {
  const std::lock_guard lock(mutex_);
  total_ = total;
  limit_ = next_ = done_count_ = 0;
}

void TransferQueue::raise(std::size_t limit) {
  {
    const std::lock_guard lock(mutex_);
    limit = std::min(limit, total_);
    if (limit <= limit_) return;
    limit_ = limit;
  }
  work_.notify_one();
}

bool TransferQueue::run_here(std::size_t index) {
  {
    const std::lock_guard lock(mutex_);
    if (stopped_ || next_ != index || done_count_ != index) return false;
    next_ = index + 1;
    limit_ = std::max(limit_, next_);
  }
  run_(index);
  const std::lock_guard lock(mutex_);
  if (!stopped_) ++done_count_;  // the caller is the only one who waits for this queue
  return true;
}

TransferQueue::Outcome TransferQueue::wait(std::size_t count, Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  wanted_ = count;
  done_.wait_until(lock, deadline, [&] { return done_count_ >= count || stopped_; });
  wanted_ = kNobodyWaits;
  if (done_count_ >= count) return Outcome::kDone;
  return stopped_ ? Outcome::kStopped : Outcome::kTimeout;
}

bool TransferQueue::is_done(std::size_t count) {
  const std::lock_guard lock(mutex_);
  return done_count_ >= count;
}

bool TransferQueue::idle() {
  const std::lock_guard lock(mutex_);
  return done_count_ == total_;
}

void TransferQueue::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  work_.notify_all();
  done_.notify_all();
}

void TransferQueue::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return next_ < limit_ || stopped_; });
    if (stopped_) return;
    const std::size_t task = next_++;
    lock.unlock();
    run_(task);
    lock.lock();
    if (stopped_) return;
    ++done_count_;
    if (done_count_ >= wanted_) {
      // Waking somebody who then has to wait for the mutex costs two switches instead of one.
      lock.unlock();
      done_.notify_one();
      lock.lock();
    }
  }
}

}  // namespace fold3d::comm
