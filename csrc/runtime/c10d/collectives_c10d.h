// comm::CollectiveStream by the collectives of a torch.distributed process group.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "comm/arbiter/nic_arbiter.h"
#include "comm/ring/collective_stream.h"
#include "core/network/hosts.h"
#include "runtime/device/device.h"
#include "runtime/device/stream_clock.h"
#include "runtime/device/tensor_buffer.h"

namespace fold3d::runtime {

/// Reduce-scatters or all-gathers of device memory by the group's library (NCCL), in slices on a stream beside the
/// compute stream; a thread asks the arbiter before each. At most two slices are under way, so a pipeline message waits
/// for no more. Sums have the library's order. A bucket that is one slice travels as it lies, a larger one through a
/// copy of each slice, as what is rounded for its journey does.
///
/// Host memory works as well (gloo), a slice at a time; gloo's collectives cannot be aborted: stop() then returns when
/// the group's time limit has passed.
///
/// The arbiter hears of no passed slices and no speed: the time of a collective contains waiting for other replicas,
/// which the library does not tell from sending.
class C10dCollectives final : public comm::CollectiveStream {
 public:
  struct Options {
    int rank = 0;  ///< replica, also the rank in the group
    int size = 2;
    comm::NicArbiter::Traffic traffic = comm::NicArbiter::Traffic::kReduce;
    std::size_t slice_bytes =
        0;                   ///< what a replica sends in a slice, the same on all; 0: 4 MiB, 256 KiB to each or more
    core::Hosts hosts = {};  ///< of each replica
  };

  /// Resolves the group by name; its ranks are the replicas of the stage, and nobody else uses it. Throws c10::Error
  /// when it does not exist, std::invalid_argument when this process is not that replica in it. `clock`: of the device.
  C10dCollectives(const Options& options, const std::string& group, c10::Device device,
                  std::shared_ptr<comm::NicArbiter> arbiter, std::shared_ptr<StreamClock> clock);
  ~C10dCollectives() override;

  void start(Listener& listener) override;
  void push(comm::Collective collective) override;
  void abort(const std::string& reason) noexcept override;
  void stop() noexcept override;
  std::string waits_for() const override;

 private:
  void loop() noexcept;
  void run(const comm::Collective& collective);
  void run_slice(const comm::Collective& collective, const at::Tensor& shards, std::int64_t offset, std::int64_t length,
                 at::Tensor staging);
  void check() const;

  const Options options_;
  const bool uses_card_;  // the library goes round the replicas as it likes: wherever they are on several hosts
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const c10::Stream stream_;  // one for all collectives: freed memory is kept for the stream that it was used on
  const std::shared_ptr<comm::NicArbiter> arbiter_;
  const std::shared_ptr<StreamClock> clock_;
  Listener* listener_ = nullptr;
  std::array<DeviceEvent, 2> slice_done_;  // of the last two slices

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<comm::Collective> queue_;  // the first is under way
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace fold3d::runtime
