#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/arbiter/nic_arbiter.h"
#include "comm/base/failure.h"
#include "comm/base/host_buffer.h"
#include "comm/base/record.h"
#include "comm/base/record_log.h"
#include "comm/base/tensor.h"
#include "comm/p2p/buffer_pool.h"
#include "comm/p2p/landing.h"
#include "comm/p2p/transfer_queue.h"
#include "comm/p2p/transport.h"
#include "core/ir/action.h"
#include "core/ir/schedule.h"
#include "core/memory/memory_model.h"
#include "core/network/hosts.h"

namespace fold3d::comm {

struct Options {
  core::Shape shape = {};  ///< pp and segments of the run; micro_batches may differ from step to step
  int stage = 0;           ///< this rank's stage, [0, shape.pp)
  std::chrono::milliseconds timeout{300'000};  ///< longest blocking wait (setting comm_timeout), > 0
  /// Messages that a receive queue may run beyond the program counter, >= 0; without those that land.
  int receive_ahead = core::kReceiveAhead;
  std::string name = {};                     ///< how errors call this rank; empty: "stage S"
  core::Hosts hosts = {};                    ///< of each stage
  bool makes_room = true;                    ///< DP.sync lets messages pass; the same on every rank
  std::function<void()> while_waiting = {};  ///< called by who waits, every kLook; what it throws ends the wait
};

/// Owns the pipeline messages of one rank: four queues (send and receive of each direction), each a thread with
/// one FIFO in the order of the program, so the order on every link is a function of the plan and never of
/// arrival time. It tells the host's arbiter about every message from or to another host, so that data-parallel traffic
/// lets it pass; of those that a device sends by itself the transport tells, which sees when they are ready.
///
/// One step: begin(program); then, walking the program, pass() and later wait() for each RECV and send() for
/// each SEND, in program order; finish().
///
/// Threads: every method but abort() and take_records() is called by one thread at a time (the executor's).
/// Errors: the first error is kept, the transport is aborted, and every pending and later call throws it
/// again (CommError or a subclass; the text names rank, action, peer and cause). There is no way back from
/// the failed state. A call that contradicts the program (unknown action, wrong order, twice) throws
/// std::logic_error and changes nothing.
///
/// A receive reaches a device only when the message's frame is here, so when the sender's host has told its device to
/// send: whatever a device waits for has been told to another. Else a host that waits for all of its device, in a
/// forward or where memory is freed, could wait for a message that it is to cause itself.
class Communicator {
 public:
  /// `arbiter`: of the rank's host; null: nobody else uses the network. Opened when the communicator fails. Throws
  /// std::invalid_argument for options out of range.
  /// `allocator`: where received tensors lie. `landing`: where those lie that a PREFETCH brings to the device; null:
  /// programs have none.
  Communicator(std::unique_ptr<Transport> transport, Options options, std::shared_ptr<NicArbiter> arbiter = nullptr,
               std::unique_ptr<Allocator> allocator = std::make_unique<HostAllocator>(),
               std::shared_ptr<Landing> landing = nullptr);
  /// Joins the queues; aborts the transport before if a step is under way. Never throws. Waits for an abort()
  /// that has begun; none may follow.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// Starts a step: queues the receives of `program` (this stage's lowered list; what is not a message, or the PREFETCH
  /// of one, is skipped), which begin to arrive at once. Every rank of the pipeline begins the same steps. Throws
  /// std::invalid_argument when an action is not this stage's or occurs twice, std::logic_error when the step
  /// before was not finished.
  /// `goes_on`: with the step before, which was left: messages may be on their way from there to here, so their frames
  /// have the same number. Waits until what was sent there is received, which may be in the receiver's next step.
  void begin(const std::vector<core::Action>& program, bool goes_on = false);

  /// The program counter has reached this RECV: it is always allowed from now on. Never blocks.
  void pass(const core::Action& recv);

  /// Queues a message; keeps the buffers alive until it is sent. Nobody may write to them before finish().
  /// The last reference may be dropped by a queue thread.
  void send(const core::Action& send, Tensors tensors);

  /// Whether wait() would return at once.
  bool has_arrived(const core::Action& recv);

  /// The message of this RECV (implies pass). Blocks for at most `timeout`.
  Tensors wait(const core::Action& recv);

  /// Ends the step: every RECV has been waited for, every SEND is complete. Each queue gets at most
  /// `timeout`. `is_left`: another step goes on with this one, and what was sent may be received there.
  void finish(bool is_left = false);

  /// Ends all communication; the first reason wins. Any thread; never throws.
  void abort(const std::string& reason);

  /// Transfers completed since the last call, grouped by queue, in the order of completion; as far as their times are
  /// known. Any thread.
  std::vector<Record> take_records();

 private:
  struct Task {
    core::Action action;
    Tensors tensors;      // send: until done; receive: from arrival until waited for
    bool waited = false;  // a receive was handed out; executor's thread only
    bool lands = false;   // a receive goes to landing_
  };

  /// One queue and its part of the step. The executor fills tasks in begin(), while the queue is idle; after
  /// that, task k is the queue's from the moment it may run until it is done, and the executor's before and
  /// after.
  struct Line {
    std::vector<Task> tasks;
    std::vector<int> positions;          // key_of(action) -> index into tasks, -1 where there is none
    std::vector<std::size_t> on_device;  // indices of the receives that do not land
    std::size_t issued = 0;              // tasks handed over by send(); executor's thread only
    std::vector<std::byte> frame;
    RecordLog log;
    std::unique_ptr<TransferQueue> queue;
  };

  Line& line(QueueId id) { return lines_[static_cast<std::size_t>(id)]; }
  void check_belongs(const core::Action& action) const;
  std::size_t key_of(const core::Action& action) const;
  std::size_t position_of(QueueId id, const core::Action& action);
  void read(const std::vector<core::Action>& program);
  std::size_t limit_after(const Line& line, std::size_t passed) const;
  void wait_done(QueueId id, std::size_t count, const core::Action& action);
  void end_sends();

  void run(QueueId id, std::size_t index) noexcept;
  void run_send(Line& line, QueueId id, Task& task);
  void run_recv(Line& line, QueueId id, Task& task);
  Tensors memory_for(const Task& task, const std::vector<TensorDesc>& descs);
  void fail(Failure::Kind kind, const std::string& text) noexcept;
  std::string describe(const core::Action& action) const;
  int peer_of(const core::Action& action) const;
  bool uses_card(const core::Action& action) const;
  bool is_announced(const core::Action& action) const;

  const Options options_;
  const std::string name_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Allocator> allocator_;
  BufferPool pool_;
  const std::shared_ptr<Landing> landing_;
  Failure failure_;
  std::mutex fail_mutex_;  // held while failing, so that the destructor does not overtake it
  const std::shared_ptr<NicArbiter> arbiter_;
  std::uint32_t step_ = 0;
  int micro_batches_ = 0;
  bool open_ = false;  // between begin() and finish()
  bool left_ = false;  // the step before is
  std::array<Line, kNumQueues> lines_;
};

}  // namespace fold3d::comm
