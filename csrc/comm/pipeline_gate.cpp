#include "comm/pipeline_gate.h"

#include <chrono>

#include "comm/clock.h"

namespace fold3d::comm {

void PipelineGate::queued() {
  newest_ns_.store(now_ns());
  pending_.fetch_add(1);
}

void PipelineGate::sent() {
  // Sequentially consistent with hold(): either it sees pending_ == 0, or we see holding_.
  if (pending_.fetch_sub(1) != 1 || !holding_.load()) return;
  {
    const std::lock_guard lock(mutex_);
  }
  changed_.notify_one();
}

void PipelineGate::hold(const core::Arbiter& arbiter) {
  if (pending_.load() == 0) return;
  const std::int64_t ready_ns = now_ns();
  std::unique_lock lock(mutex_);
  holding_.store(true);
  while (!open_.load() && pending_.load() > 0) {
    // A message queued meanwhile moves the time; it is looked at again when the time has come.
    const std::int64_t start_ns =
        arbiter.start_ns(ready_ns, {.pending = pending_.load(), .newest_ns = newest_ns_.load()});
    if (start_ns <= now_ns()) break;
    changed_.wait_until(lock, time_point_of(start_ns));
  }
  holding_.store(false);
}

void PipelineGate::open() {
  open_.store(true);
  {
    const std::lock_guard lock(mutex_);
  }
  changed_.notify_one();
}

}  // namespace fold3d::comm
