#include "runtime/executor/executor.h"

#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <chrono>
#include <stdexcept>
#include <utility>

#include "core/ir/deps.h"
#include "runtime/executor/tensor_buffer.h"

namespace fold3d::runtime {

namespace {

using core::Action;
using core::Kind;

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// The same values without history, requiring gradients where the original does: what crosses a chunk border on one
/// rank.
std::vector<at::Tensor> cut(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> leaves;
  leaves.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    leaves.push_back(tensor.detach());
    if (tensor.requires_grad()) leaves.back().set_requires_grad(true);
  }
  return leaves;
}

torch::autograd::edge_list roots_of(const std::vector<at::Tensor>& outputs) {
  torch::autograd::edge_list roots;
  for (const at::Tensor& output : outputs) {
    if (output.requires_grad()) roots.push_back(torch::autograd::impl::gradient_edge(output));
  }
  return roots;
}

/// As torch::autograd::backward() of the outputs whose `roots` these are.
void run_graph(const torch::autograd::edge_list& roots, const std::vector<at::Tensor>& gradients) {
  torch::autograd::Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/false, /*create_graph=*/false,
                                                        /*accumulate_grad=*/true);
}

/// Gradients of those inputs that require one, zeros where nothing reached an input.
std::vector<at::Tensor> input_gradients(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& input : inputs) {
    if (!input.requires_grad()) continue;
    gradients.push_back(input.grad().defined() ? input.grad() : at::zeros_like(input));
  }
  return gradients;
}

}  // namespace

Executor::Executor(std::shared_ptr<comm::Communicator> communicator, int stage,
                   std::vector<std::shared_ptr<Chunk>> chunks)
    : communicator_(std::move(communicator)), stage_(stage), chunks_(std::move(chunks)) {}

Executor::Stash& Executor::stash(int chunk, int micro_batch) {
  return stashes_[static_cast<std::size_t>(chunk / shape_.pp * shape_.micro_batches + micro_batch)];
}

bool Executor::is_local(int chunk, int other_chunk) const {
  return shape_.stage_of(chunk) == shape_.stage_of(other_chunk);
}

std::vector<at::Tensor> Executor::run(const core::Shape& shape, const std::vector<Action>& program, bool backward) {
  if (static_cast<int>(chunks_.size()) != shape.segments) {
    throw std::logic_error("the executor holds " + std::to_string(chunks_.size()) + " chunks, the schedule has " +
                           std::to_string(shape.segments) + " segments");
  }
  shape_ = shape;
  backward_ = backward;
  stashes_.assign(static_cast<std::size_t>(shape.segments * shape.micro_batches), Stash{});
  results_.assign(stage_ == shape.stage_of(shape.num_chunks() - 1) ? static_cast<std::size_t>(shape.micro_batches) : 0,
                  at::Tensor());
  const c10::AutoGradMode grad_mode(backward);
  try {
    run_all(program);
  } catch (...) {
    stashes_.clear();
    results_.clear();
    throw;
  }
  stashes_.clear();
  const std::lock_guard lock(mutex_);
  running_ = false;
  return std::move(results_);
}

void Executor::run_all(const std::vector<Action>& program) {
  if (communicator_) communicator_->begin(program);
  for (const Action& action : program) {
    {
      const std::lock_guard lock(mutex_);
      current_ = action;
      running_ = true;
    }
    execute(action);
  }
  if (communicator_) {
    const std::int64_t start = now_ns();
    communicator_->finish();
    spans_.push_back({program.empty() ? Action{} : program.back(), true, start, now_ns()});
  }
}

void Executor::execute(const Action& action) {
  switch (action.kind) {
    case Kind::kForward:
    case Kind::kBackward: {
      wait_for_receives(action);
      const std::int64_t start = now_ns();
      action.kind == Kind::kForward ? forward(action) : backward(action);
      spans_.push_back({action, false, start, now_ns()});
      break;
    }
    case Kind::kSendForward:
    case Kind::kSendBackward:
      send(action);
      break;
    case Kind::kRecvForward:
    case Kind::kRecvBackward:
      communicator_->pass(action);
      break;
    case Kind::kReduce:
      chunks_[static_cast<std::size_t>(action.chunk / shape_.pp)]->reduce();
      break;
    default:
      throw std::invalid_argument("the executor runs whole backward passes; action " + core::to_string(action) +
                                  " splits one: use a schedule of F and B actions");
  }
}

void Executor::wait_for_receives(const Action& action) {
  for (const Action& needed : core::waits_for(shape_, action, /*with_comm=*/true)) {
    if (!core::is_recv(needed.kind)) continue;  // the others ran before: program order
    const std::int64_t start = now_ns();
    std::vector<at::Tensor> received;
    for (const comm::Tensor& tensor : communicator_->wait(needed)) received.push_back(unwrap(tensor));
    spans_.push_back({needed, true, start, now_ns()});
    Stash& target = stash(action.chunk, action.micro_batch);
    (needed.kind == Kind::kRecvForward ? target.inputs : target.gradients) = std::move(received);
  }
}

void Executor::forward(const Action& action) {
  const auto& chunk = chunks_[static_cast<std::size_t>(action.chunk / shape_.pp)];
  Stash& own = stash(action.chunk, action.micro_batch);
  own.outputs = chunk->forward(action.micro_batch, own.inputs);
  const int next = action.chunk + 1;
  if (next == shape_.num_chunks()) {
    auto& result = results_[static_cast<std::size_t>(action.micro_batch)];
    if (!own.outputs.empty()) result = own.outputs.front().detach();
  } else if (is_local(action.chunk, next)) {
    stash(next, action.micro_batch).inputs = cut(own.outputs);
    own.roots = roots_of(own.outputs);
    own.outputs.clear();
  }
}

void Executor::backward(const Action& action) {
  Stash own = std::move(stash(action.chunk, action.micro_batch));
  stash(action.chunk, action.micro_batch) = Stash{};
  if (action.chunk + 1 == shape_.num_chunks()) {
    const std::vector<at::Tensor> losses = std::move(own.outputs);
    if (!losses.empty() && losses.front().requires_grad()) torch::autograd::backward(losses);
  } else {
    if (own.roots.size() != own.gradients.size()) {
      throw std::runtime_error(core::to_string(action) + ": " + std::to_string(own.gradients.size()) +
                               " gradients arrived for " + std::to_string(own.roots.size()) + " outputs");
    }
    if (!own.roots.empty()) run_graph(std::exchange(own.roots, {}), std::exchange(own.gradients, {}));
  }
  std::vector<at::Tensor> gradients = input_gradients(own.inputs);
  const int previous = action.chunk - 1;
  if (previous < 0) return;
  if (is_local(action.chunk, previous)) {
    stash(previous, action.micro_batch).gradients = std::move(gradients);
  } else {
    stash(action.chunk, action.micro_batch).gradients = std::move(gradients);  // until SEND_B, the next action
  }
}

void Executor::send(const Action& action) {
  Stash& own = stash(action.chunk, action.micro_batch);
  const bool is_forward = action.kind == Kind::kSendForward;
  comm::Tensors message;
  for (const at::Tensor& tensor : is_forward ? own.outputs : own.gradients) message.push_back(wrap(tensor));
  if (is_forward && backward_) {
    own.roots = roots_of(own.outputs);
    own.outputs.clear();
  } else {
    own = Stash{};
  }
  communicator_->send(action, std::move(message));
}

std::string Executor::current_action() const {
  const std::lock_guard lock(mutex_);
  return running_ ? core::to_string(current_) : "";
}

std::vector<Span> Executor::take_spans() { return std::exchange(spans_, {}); }

}  // namespace fold3d::runtime
