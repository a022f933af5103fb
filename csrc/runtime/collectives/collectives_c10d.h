// comm::CollectiveStream by the collectives of a torch.distributed process group.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "comm/arbiter/nic_arbiter.h"
#include "comm/bucket/collective_stream.h"
#include "comm/bucket/slice_meter.h"
#include "core/network/hosts.h"
#include "runtime/device/device.h"
#include "runtime/device/stream_clock.h"
#include "runtime/device/tensor_buffer.h"

namespace fold3d::runtime {

/// Reduce-scatters or all-gathers of device memory by the group's library (NCCL), on a stream beside the compute
/// stream. Sums have the library's order, which may follow the length of a slice. Once its last slice is launched a
/// collective is usable by streams that wait for a mark: `ready` of its buffer has that of the sums then, `gathered`
/// that of a gather.
///
/// Where messages of the pipeline go over the same cards, it goes in slices (core::SliceRule), and a thread asks the
/// arbiter before each: a slice is held back, for a bounded time, while a message that is ready is on its way. At most
/// two slices are under way, so a message waits for no more. The first is launched when the bucket is ready, not
/// before: what is launched cannot be held back. Elsewhere a bucket travels in one, and is launched at once. Either
/// way nothing is copied but what is rounded for its journey.
///
/// Replicas cut alike: the speed that decides it is measured by each and agreed on in the group, in the order of its
/// collectives. They hold back on their own, and a slice moves when all have launched it.
///
/// Since nobody else need wait for the device, this thread keeps the time: a slice that the device does not pass within
/// `timeout` ends the stream with a failure of that kind. The time counts from when this rank's device comes to it; for
/// how long it computes before that is no matter of communication, and the others notice.
///
/// Host memory works as well (gloo), a slice at a time; gloo's collectives cannot be aborted: stop() then returns when
/// the group's time limit has passed.
class C10dCollectives final : public comm::CollectiveStream {
 public:
  struct Options {
    int rank = 0;  ///< replica, also the rank in the group
    int size = 2;
    comm::NicArbiter::Traffic traffic = comm::NicArbiter::Traffic::kReduce;
    std::size_t slice_bytes = 0;  ///< what a replica sends in a slice, the same on all; 0: as core::SliceRule says
    core::Hosts hosts = {};       ///< of each replica
    bool makes_room = true;       ///< for messages on the cards that it uses; the same on all replicas
    std::chrono::milliseconds timeout{300'000};  ///< for a slice of all replicas (setting comm_timeout)
  };

  /// Resolves the group by name; its ranks are the replicas of the stage, and nobody else uses it. Throws c10::Error
  /// when it does not exist, std::invalid_argument when this process is not that replica in it. `clock`: of the device.
  /// `meter`: of this rank.
  C10dCollectives(const Options& options, const std::string& group, c10::Device device,
                  std::shared_ptr<comm::NicArbiter> arbiter, std::shared_ptr<StreamClock> clock,
                  std::shared_ptr<comm::SliceMeter> meter);
  ~C10dCollectives() override;

  void start(Listener& listener) override;
  void push(comm::Collective collective) override;
  void abort(const std::string& reason) noexcept override;
  void stop() noexcept override;
  std::string waits_for() const override;
  bool waits_for_own_rank() const override { return waits_for_own_rank_; }

 private:
  /// A slice under way.
  struct Slice {
    DeviceEvent begun{DeviceEvent::Clock::kDevice}, done{DeviceEvent::Clock::kDevice};
    double bytes = 0;  // 0: none
  };

  void loop() noexcept;
  void run(const comm::Collective& collective);
  std::int64_t slice_bytes() const;
  void agree();
  void note(Slice& slice, double seconds);
  void measure();
  void finish(Slice& slice);
  void run_slice(const comm::Collective& collective, at::Tensor rows, const at::Tensor& rounded, Slice& slice);
  static bool fits_the_library(const at::Tensor& rows);
  void reduce_scatter(const at::Tensor& rows);
  void all_gather(const at::Tensor& rows);
  void await_own_rank(const DeviceEvent& mark);
  void await_replicas(const DeviceEvent& done, std::chrono::nanoseconds usual) const;
  bool is_stopped() const;
  void check() const;

  const Options options_;
  const bool uses_card_;   // the library goes round the replicas as it likes: wherever they are on several hosts
  const bool makes_room_;  // for messages: by slices that are held back
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const c10::Stream stream_;  // one for all collectives: freed memory is kept for the stream that it was used on
  const std::shared_ptr<comm::NicArbiter> arbiter_;
  const std::shared_ptr<StreamClock> clock_;
  const std::shared_ptr<comm::SliceMeter> meter_;
  const std::string others_;  // of the stage, for error messages
  Listener* listener_ = nullptr;
  std::array<Slice, 2> slices_;                 // the last two
  std::int64_t number_ = 0;                     // collectives that began
  double timed_bytes_ = 0, timed_seconds_ = 0;  // of the collective's slices
  double measured_ = 0;  // bytes per second, the most of a collective since the replicas last agreed; 0: not known
  double agreed_ = 0;    // the least of the replicas' then
  std::atomic<bool> waits_for_own_rank_{false};

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<comm::Collective> queue_;  // the first is under way
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace fold3d::runtime
