#include "runtime/executor/executor.h"

#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <stdexcept>
#include <utility>

#include "core/ir/deps.h"
#include "core/ir/versions.h"
#include "core/passes/head.h"
#include "runtime/device/tensor_buffer.h"
#include "runtime/executor/handlers.h"

namespace fold3d::runtime {

namespace {

using core::Action;
using core::Kind;

/// The name of a range in torch's profiler (and in NVTX, under torch.autograd.profiler.emit_nvtx): what is done, and
/// for which stage, chunk and micro-batch. Made only while somebody profiles.
std::string range_of(const Action& action, int stage, const char* sync = "") {
  const bool has_micro_batch = action.kind != Kind::kReduce;
  return sync + std::string(core::to_string(action.kind)) + " stage " + std::to_string(stage) + " chunk " +
         std::to_string(action.chunk) +
         (has_micro_batch ? " micro-batch " + std::to_string(action.micro_batch) : std::string());
}

const char* sync_of(Kind kind) {
  if (kind == Kind::kReduce) return "DP.sync ";
  return core::is_copy(kind) ? "" : "PP.sync ";
}

}  // namespace

Executor::Executor(std::shared_ptr<comm::Communicator> communicator, int stage,
                   std::vector<std::shared_ptr<Chunk>> chunks, std::shared_ptr<Offloader> offloader,
                   std::shared_ptr<StreamClock> clock)
    : communicator_(std::move(communicator)),
      stage_(stage),
      chunks_(std::move(chunks)),
      offloader_(std::move(offloader)),
      clock_(std::move(clock)) {}

void Executor::begin(const core::Shape& shape, bool backward) {
  state_ = RunState{shape, backward, communicator_.get(), offloader_.get(), chunks_, {}, {}, {}, {}, {}};
  state_.stashes.resize(static_cast<std::size_t>(shape.segments * shape.micro_batches));
  for (auto* const each : {&state_.leaving, &state_.landing[0], &state_.landing[1]}) {
    each->resize(state_.stashes.size());
  }
}

std::vector<at::Tensor> Executor::run(const core::Shape& shape, const std::vector<Action>& program, bool backward,
                                      Continues continues) {
  if (static_cast<int>(chunks_.size()) != shape.segments) {
    throw std::logic_error("the executor holds " + std::to_string(chunks_.size()) + " chunks, the schedule has " +
                           std::to_string(shape.segments) + " segments");
  }
  if (continues.before != is_left_ || (is_left_ && state_.shape != shape)) {
    throw std::logic_error(is_left_ ? "the pipeline is not drained" : "there is no run to go on with");
  }
  if (!continues.before) begin(shape, backward);
  for (const Action& action : program) {
    if (action.kind == Kind::kRecompute) state_.stash(action.chunk, action.micro_batch).recomputes = true;
    if (!core::is_copy(action.kind)) continue;
    if (!offloader_)
      throw std::logic_error(core::to_string(action) + " is in the program of an executor without a pool");
    const std::size_t number = state_.number_of(action.chunk, action.micro_batch);
    if (action.kind == Kind::kOffload) state_.leaving[number] = true;
    if (action.kind == Kind::kPrefetchForward) state_.landing[0][number] = true;
    if (action.kind == Kind::kPrefetchBackward) state_.landing[1][number] = true;
  }
  if (stage_ == shape.stage_of(shape.num_chunks() - 1)) {
    state_.results.resize(static_cast<std::size_t>(shape.micro_batches));
    state_.turning_heads = core::turning_heads(shape, program);
  }
  const c10::AutoGradMode grad_mode(backward);
  try {
    if (offloader_) offloader_->begin(shape, program);
    run_all(program, continues);
  } catch (...) {
    state_ = {};
    is_left_ = false;
    throw;
  }
  std::vector<at::Tensor> results = std::exchange(state_.results, {});
  is_left_ = continues.after;
  if (!is_left_) {
    state_ =
        {};  // before the lock: freeing what Python has seen takes the GIL, and whoever holds it may ask where we are
  }
  const std::lock_guard lock(mutex_);
  running_ = false;
  return results;
}

void Executor::run_all(const std::vector<Action>& program, Continues continues) {
  if (communicator_) communicator_->begin(program, continues.before);
  const bool flows = continues.before || continues.after;
  const std::vector<bool> of_before = flows ? core::of_step_before(state_.shape, program) : std::vector<bool>();
  for (std::size_t k = 0; k < program.size(); ++k) {
    const Action& action = program[k];
    {
      const std::lock_guard lock(mutex_);
      current_ = action;
      running_ = true;
    }
    if (core::is_compute(action.kind)) {
      if (flows) state_.chunk(action.chunk).turn_to(action.micro_batch, of_before[k]);
      compute(action);
    } else {
      RECORD_USER_SCOPE(range_of(action, stage_, sync_of(action.kind)));
      handler_of(action.kind)(state_, action);
    }
  }
  if (communicator_) {
    const comm::Moment start = clock_->now();
    communicator_->finish(continues.after);
    spans_.push_back({program.empty() ? Action{} : program.back(), true, start, clock_->now()});
  }
}

void Executor::compute(const Action& action) {
  wait_for_receives(action);
  wait_for_copies(action);
  const comm::Moment start = clock_->now();
  RECORD_USER_SCOPE(range_of(action, stage_));
  handler_of(action.kind)(state_, action);
  spans_.push_back({action, false, start, clock_->now()});
}

void Executor::wait_for_receives(const Action& action) {
  for (const Action& needed : core::waits_for(state_.shape, action, /*with_comm=*/true)) {
    if (!core::is_recv(needed.kind)) continue;  // the others ran before: program order
    Stash& target = state_.stash(action.chunk, action.micro_batch);
    const bool forward = needed.kind == Kind::kRecvForward;
    RECORD_USER_SCOPE(range_of(needed, stage_, "PP.sync wait "));
    if (state_.lands(needed)) {
      if (forward ? target.inputs_away : target.gradients_away) continue;  // its PREFETCH has begun
      const comm::Moment start = clock_->now();
      const comm::Tensors message = communicator_->wait(needed);
      spans_.push_back({needed, true, start, clock_->now()});
      fetch_message(state_, needed, message);
      continue;
    }
    const comm::Moment start = clock_->now();
    std::vector<at::Tensor> received;
    for (const comm::Tensor& tensor : communicator_->wait(needed)) received.push_back(unwrap(tensor));
    spans_.push_back({needed, true, start, clock_->now()});
    (forward ? target.inputs : target.gradients) = std::move(received);
  }
}

void Executor::wait_for_copies(const Action& action) {
  Stash& own = state_.stash(action.chunk, action.micro_batch);
  const auto wait = [&](StashBatch& batch, Kind prefetch) {
    offloader_->arrived(batch, {action.chunk, prefetch, action.micro_batch});
  };
  if (own.batch) wait(*own.batch, Kind::kPrefetch);
  if (own.inputs_away && action.kind == Kind::kForward) {
    wait(*own.inputs_away.batch, Kind::kPrefetchForward);
    own.inputs = own.inputs_away.unpack();
  }
  const bool takes_gradients = action.kind == Kind::kBackward || action.kind == Kind::kBackwardInput;
  if (own.gradients_away && takes_gradients) {
    wait(*own.gradients_away.batch, Kind::kPrefetchBackward);
    own.gradients = own.gradients_away.unpack();
  }
}

std::string Executor::current_action() const {
  const std::lock_guard lock(mutex_);
  return running_ ? core::to_string(current_) : "";
}

std::vector<Span> Executor::take_spans() {
  std::vector<Span> spans = comm::take_known(spans_, [](const Span& span) { return span.end.ns() && span.start.ns(); });
  if (!offloader_) return spans;
  for (const CopySpan& copy : offloader_->take_spans()) {
    spans.push_back({copy.action, copy.is_wait, copy.start, copy.end, copy.bytes});
  }
  return spans;
}

}  // namespace fold3d::runtime
