// Offloader: moves stashes between the device and the pool, beside what the rank computes (Fold3D V-B).
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/base/moment.h"
#include "core/ir/schedule.h"
#include "memory/copy_lane.h"
#include "memory/host_pool.h"
#include "runtime/device/stream_clock.h"
#include "runtime/offload/device_copies.h"
#include "runtime/offload/message_landing.h"
#include "runtime/offload/parcel.h"
#include "runtime/offload/pool_plan.h"
#include "runtime/offload/stash_batch.h"

namespace fold3d::runtime {

struct OffloadOptions {
  std::int64_t pool_bytes = 0;      ///< reserved at once; 0: what the stashes of the first step ask for
  std::int64_t expected_bytes = 0;  ///< of a pool without a size: reserved at once, more when more is asked for
  std::string disk = {};            ///< folder of the pool's file; empty: host memory
  bool packs = false;               ///< small pieces are put together by the kernel `pack`, not by torch's `cat`
  double bytes_per_second = 0;      ///< of copies, both directions together; 0: as fast as they are
  std::chrono::milliseconds timeout{300'000};
  std::function<void()> while_waiting = {};  ///< called by who waits, now and then; what it throws ends the wait
};

struct OffloadCounters {
  std::int64_t device_bytes = 0;  ///< of what moves, on the device now
  std::int64_t device_peak = 0;   ///< the most since the run began
  std::int64_t pool_bytes = 0;    ///< reserved
  std::int64_t pool_peak = 0;
  std::int64_t late = 0;  ///< copies that somebody waited for, since the run began
};

/// A copy, or a wait for one, on a device of its compute stream.
struct CopySpan {
  core::Action action;
  bool is_wait;
  comm::Moment start, end;
  std::int64_t bytes;
};

/// All but counters() and landing() is called by the thread that walks the program.
class Offloader {
 public:
  /// `clock`: of the device. Throws memory::PoolError if the pool cannot be had.
  Offloader(c10::Device device, OffloadOptions options, std::shared_ptr<StreamClock> clock);

  /// A run of `program` begins, when what was under way is over. Throws memory::PoolError if a copy failed.
  void begin(const core::Shape& shape, const std::vector<core::Action>& program);

  /// Memory of these tensors stays where it is, in the runs to come: parameters, buffers, the batch.
  void keep(const std::vector<at::Tensor>& tensors);

  /// A forward begins whose stash leaves.
  std::shared_ptr<StashBatch> batch() const { return std::make_shared<StashBatch>(staying_); }
  /// It is over: what the batch has is on the device.
  void stashed(StashBatch& batch);
  /// Begins to copy the batch to the pool, after waiting for the last but one OFFLOAD to be done (those of borders for
  /// themselves); its memory goes as soon as it is copied and nobody else has it. Throws memory::PoolError.
  void leave(const std::shared_ptr<StashBatch>& batch, const core::Action& action);
  /// A message that landed in the pool, as what come() brings to the device.
  Parcel landed(const comm::Tensors& message) const;
  /// Begins to bring it back.
  void come(const std::shared_ptr<StashBatch>& batch, const core::Action& action);
  /// Work that the calling thread queues on its device from now on finds the batch in place; `action`: its PREFETCH.
  void arrived(StashBatch& batch, const core::Action& action);

  /// Where messages land. Any thread.
  comm::Landing& landing() { return landing_; }

  /// What happened since the last call, as far as its times are known.
  std::vector<CopySpan> take_spans();
  OffloadCounters counters() const;

 private:
  struct Arena {
    std::atomic<std::int64_t> bytes = 0, peak = 0;
    void add(std::int64_t more);
  };

  std::shared_ptr<void> on_device(std::int64_t bytes) const;
  void wait(memory::CopyLane& lane, memory::CopyLane::Ticket ticket, const core::Action& action);

  const c10::Device device_;
  const OffloadOptions options_;
  const std::shared_ptr<StreamClock> clock_;
  DeviceCopies copies_;
  memory::HostPool pool_;
  std::shared_ptr<const Staying> staying_ = std::make_shared<Staying>();
  std::shared_ptr<Arena> arena_ = std::make_shared<Arena>();
  PoolPlan plan_;
  using Leaving = std::deque<std::pair<memory::CopyLane::Ticket, core::Action>>;
  Leaving stashes_leaving_, borders_leaving_;
  std::vector<CopySpan> waits_, copied_;  // that nobody has taken
  std::int64_t late_ = 0;
  memory::CopyLane out_, in_;  // late: they end first
  MessageLanding landing_;
};

}  // namespace fold3d::runtime
