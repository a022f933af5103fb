// Executor: walks a rank's actions, runs its chunks and hands tensors to the communicator.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/base/moment.h"
#include "comm/p2p/communicator.h"
#include "core/ir/schedule.h"
#include "runtime/device/stream_clock.h"
#include "runtime/executor/chunk.h"
#include "runtime/executor/run_state.h"

namespace fold3d::runtime {

/// What the compute lane did, an action or the wait for what it depends on, and what was copied beside it. On a device
/// the lane is its compute stream: an action is what the device computes, a wait what it idles before.
struct Span {
  core::Action action;
  bool is_wait;
  comm::Moment start, end;
  std::int64_t bytes = 0;  ///< of a copy
};

/// How a run stands to those before and after it. Without a flush (core/passes/repeat.h) it goes on with what the run
/// before has left, and leaves the rest to the next one.
struct Continues {
  bool before = false;
  bool after = false;
};

/// Runs one rank's part of a schedule, in program order, on the calling thread; what it does for each kind of action
/// stands in handlers.cpp.
///
/// An action starts when what core::waits_for names is complete: earlier actions of this rank are, by program order;
/// a receive is waited for. Sends are handed to the communicator and finish in the background; run() returns when they
/// are done. What a chunk's reduce() began is its own: run() does not wait for it. One thread at a time;
/// current_action() from any thread.
class Executor {
 public:
  /// `communicator` may be null when the rank talks to nobody (one stage). `chunks[k]`: segment k's chunk. `offloader`:
  /// for programs with OFFLOAD; null: there are none. `clock`: of the device that the chunks compute on.
  Executor(std::shared_ptr<comm::Communicator> communicator, int stage, std::vector<std::shared_ptr<Chunk>> chunks,
           std::shared_ptr<Offloader> offloader, std::shared_ptr<StreamClock> clock);

  /// Runs `program`, a lowered list of actions with `shape`. Gradients accumulate in the parameters' .grad.
  /// Returns the last chunk's output of every micro-batch in order, detached (empty on other ranks).
  /// Throws what a chunk or the communicator threw; the caller then aborts the communicator. Nothing of the run is kept
  /// then, but current_action() still tells where it was. Throws std::logic_error for a run that does not fit what the
  /// one before has left.
  std::vector<at::Tensor> run(const core::Shape& shape, const std::vector<core::Action>& program, bool backward,
                              Continues continues = {});

  /// Text of the action in progress ("" between runs), for error messages.
  std::string current_action() const;

  /// Null where nothing leaves the device.
  Offloader* offloader() const { return offloader_.get(); }

  /// Takes the spans since the last call, as far as their times are known.
  std::vector<Span> take_spans();

 private:
  void begin(const core::Shape& shape, bool backward);
  void run_all(const std::vector<core::Action>& program, Continues continues);
  void compute(const core::Action& action);
  void wait_for_receives(const core::Action& action);
  void wait_for_copies(const core::Action& action);

  std::shared_ptr<comm::Communicator> communicator_;
  int stage_;
  std::vector<std::shared_ptr<Chunk>> chunks_;
  std::shared_ptr<Offloader> offloader_;
  const std::shared_ptr<StreamClock> clock_;

  RunState state_;        // of the run in progress, or of the one that another goes on with
  bool is_left_ = false;  // to another
  std::vector<Span> spans_;

  mutable std::mutex mutex_;  // guards current_
  core::Action current_{};
  bool running_ = false;
};

}  // namespace fold3d::runtime
