// Executor: walks a rank's actions, runs its chunks and hands tensors to the communicator.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/p2p/communicator.h"
#include "core/ir/schedule.h"
#include "runtime/executor/chunk.h"

namespace fold3d::runtime {

/// What the compute lane did: an action, or the wait for what it depends on. Times are steady-clock nanoseconds.
struct Span {
  core::Action action;
  bool is_wait;
  std::int64_t start_ns, end_ns;
};

/// Runs one rank's part of a schedule, in program order, on the calling thread.
///
/// An action starts when what core::waits_for names is complete: earlier actions of this rank are, by program order;
/// a receive is waited for. Sends are handed to the communicator and finish in the background; run() returns when they
/// are done. What a chunk's reduce() began is its own: run() does not wait for it. One thread at a time;
/// current_action() from any thread.
class Executor {
 public:
  /// `communicator` may be null when the rank talks to nobody (one stage). `chunks[k]`: segment k's chunk.
  Executor(std::shared_ptr<comm::Communicator> communicator, int stage, std::vector<std::shared_ptr<Chunk>> chunks);

  /// Runs `program`, a lowered list of actions with `shape`. Gradients accumulate in the parameters' .grad.
  /// Returns the last chunk's output of every micro-batch in order, detached (empty on other ranks).
  /// Throws what a chunk or the communicator threw; the caller then aborts the communicator. Nothing of the run is kept
  /// then, but current_action() still tells where it was.
  std::vector<at::Tensor> run(const core::Shape& shape, const std::vector<core::Action>& program, bool backward);

  /// Text of the action in progress ("" between runs), for error messages.
  std::string current_action() const;

  /// Takes the compute lane's spans since the last call.
  std::vector<Span> take_spans();

 private:
  /// One micro-batch on one chunk between its forward and its backward. `outputs`: until they are handed on, and the
  /// last chunk's until its backward. `roots`: where the gradients of those outputs that require one go into the graph,
  /// which keeps of the outputs what it needs itself.
  struct Stash {
    std::vector<at::Tensor> inputs, outputs, gradients;
    torch::autograd::edge_list roots;
  };

  Stash& stash(int chunk, int micro_batch);
  bool is_local(int chunk, int other_chunk) const;
  void wait_for_receives(const core::Action& action);
  void forward(const core::Action& action);
  void backward(const core::Action& action);
  void send(const core::Action& action);
  void execute(const core::Action& action);
  void run_all(const std::vector<core::Action>& program);

  std::shared_ptr<comm::Communicator> communicator_;
  int stage_;
  std::vector<std::shared_ptr<Chunk>> chunks_;

  core::Shape shape_{};
  bool backward_ = true;
  std::vector<Stash> stashes_;       // [segment * micro_batches + micro_batch]
  std::vector<at::Tensor> results_;  // [micro_batch]
  std::vector<Span> spans_;

  mutable std::mutex mutex_;  // guards current_
  core::Action current_{};
  bool running_ = false;
};

}  // namespace fold3d::runtime
