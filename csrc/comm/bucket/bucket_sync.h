#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/arbiter/nic_arbiter.h"
#include "comm/base/failure.h"
#include "comm/bucket/collective.h"
#include "comm/bucket/collective_stream.h"

namespace fold3d::comm {

/// DP.sync of one rank: reduce-scatters of its gradient buckets and all-gathers of gradients or parameters, over the
/// replicas of its stage. Two streams, one of each kind: a gather does not wait for the reduce-scatters behind it.
///
/// The order on each stream is the same on all replicas, whatever the timing: reduce-scatters in the order of the
/// reduce() calls; gathers step by step, in each step first the early ones in the order given to begin(), each when its
/// own reduce-scatter is done and its predecessors have begun, then the others in the order of the gather() calls.
/// Gathers may still run when the next step begins.
///
/// Waits are limited to `timeout`, in which the time does not count that this rank's own device computes before a
/// collective can begin.
///
/// Threads: all calls from any thread; begin(), reduce() and gather() of a step from one at a time.
/// Errors: the first one is kept and ends both streams; every pending and later call throws it again (CommError or a
/// subclass). There is no way back from the failed state. Calls that contradict the plan throw std::logic_error or
/// std::invalid_argument and change nothing.
class BucketSync final : private CollectiveStream::Listener {
 public:
  struct Options {
    std::chrono::milliseconds timeout{300'000};  ///< longest blocking wait (setting comm_timeout), > 0
    std::string name = "this rank";              ///< how errors call it
    int size = 2;                                ///< replicas of the stage
    std::function<void()> while_waiting = {};    ///< called by who waits, every kLook; what it throws ends the wait
  };

  /// Starts the streams. `arbiter` is opened when the streams fail.
  BucketSync(Options options, std::shared_ptr<NicArbiter> arbiter, std::unique_ptr<CollectiveStream> reduce_stream,
             std::unique_ptr<CollectiveStream> gather_stream);
  /// As close(). Never throws.
  ~BucketSync() override;
  BucketSync(const BucketSync&) = delete;
  BucketSync& operator=(const BucketSync&) = delete;

  /// A step of training begins. `gather_order`: the buckets whose reduced gradients are gathered without further ado.
  /// All replicas begin the same steps with the same order. Throws std::invalid_argument when a bucket occurs twice,
  /// std::logic_error when an early bucket of the step before was never reduced.
  void begin(std::int64_t step, const std::vector<int>& gather_order);
  /// Queues the reduce-scatter of a bucket's gradients, in place (`collective.step` is filled in); behind it the
  /// gather, if the bucket is in the gather order. Once per bucket and step. Never blocks.
  void reduce(Collective collective);
  /// Queues an all-gather in place, behind all gathers queued or planned before; of a bucket whose reduce-scatter is
  /// under way it begins once that is done. Never blocks.
  void gather(Collective collective);

  /// Returns when the sums of the bucket's reduce-scatter of this step may be used: on a device, by streams that wait
  /// for the mark of its buffer. Blocks for at most `timeout`. Throws std::logic_error when the bucket was not reduced
  /// in this step; with `step`, when its newest reduce-scatter is not that step's.
  void wait_reduced(int bucket, std::optional<std::int64_t> step = {});
  /// Returns when the bucket's newest gather may be used, at once when there is none. Blocks for at most `timeout`.
  void wait_gathered(int bucket);
  /// Whether wait_gathered() would return at once.
  bool is_gathered(int bucket);
  /// Returns when all that was handed over and could begin is done, on a device, too. Blocks for at most `timeout`.
  void drain();

  /// What was completed since the last call, in the order of completion; as far as its times are known.
  std::vector<CollectiveRecord> take_records();

  /// Ends both streams; the first reason wins. Never throws.
  void abort(const std::string& reason) noexcept;
  /// Ends both streams and their threads, whatever is under way. Idempotent. Never throws.
  void close() noexcept;

 private:
  struct Bucket {
    std::int64_t reduced_step = std::numeric_limits<std::int64_t>::min();  // of the newest reduce()
    bool reducing = false;
    int gathering = 0;  // gathers queued or planned since its reduce(), and not usable
  };
  /// What is in one of the streams.
  struct Running {
    int count = 0;
    bool is_usable = false;  // the first of them
  };
  /// A place in the order of the gathers.
  struct Slot {
    int bucket = 0;
    std::int64_t step = 0;
    bool ready = false;  // its reduce-scatter is done, or it waits for none
    Collective collective = {};
  };

  void usable(NicArbiter::Traffic traffic, int bucket) override;
  void completed(const CollectiveRecord& record) override;
  void failed(Failure::Kind kind, const std::string& text) override;

  Bucket& bucket(int number);
  Running& running(NicArbiter::Traffic traffic) {
    return traffic == NicArbiter::Traffic::kGather ? gathers_ : reduces_;
  }
  void now_usable(NicArbiter::Traffic traffic, int bucket);
  void push_ready_gathers();
  template <class Done>
  void wait(const std::string& what, NicArbiter::Traffic traffic, Done done);
  std::string cause_of_wait(NicArbiter::Traffic traffic) const;
  void fail(Failure::Kind kind, const std::string& text) noexcept;

  const Options options_;
  const std::shared_ptr<NicArbiter> arbiter_;
  Failure failure_;

  mutable std::mutex mutex_;  // guards what follows; the streams' own locks come after it
  std::condition_variable changed_;
  bool begun_ = false;
  std::int64_t step_ = 0;
  std::vector<Bucket> buckets_;
  std::deque<Slot> slots_;  // gathers that are not in the stream yet
  Running reduces_, gathers_;
  std::vector<CollectiveRecord> records_;

  // Last: their threads call usable(), completed() and failed().
  const std::unique_ptr<CollectiveStream> reduce_stream_, gather_stream_;
};

}  // namespace fold3d::comm
