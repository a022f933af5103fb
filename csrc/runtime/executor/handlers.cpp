#include "runtime/executor/handlers.h"

#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <stdexcept>
#include <string>
#include <utility>

#include "runtime/executor/tensor_buffer.h"

namespace fold3d::runtime {
namespace {

using core::Action;
using core::Kind;

/// The same values without history, requiring gradients where the original does: what crosses a chunk border on one
/// rank.
std::vector<at::Tensor> detach_leaves(const std::vector<at::Tensor>& tensors) {
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

/// A chunk's input gradients go to the chunk before: at once on this rank, else with SEND_B, the next action.
void hand_back(RunState& run, const Action& action, const std::vector<at::Tensor>& inputs) {
  const int previous = action.chunk - 1;
  if (previous < 0) return;
  const int holder = run.is_local(action.chunk, previous) ? previous : action.chunk;
  run.stash(holder, action.micro_batch).gradients = input_gradients(inputs);
}

void forward(RunState& run, const Action& action) {
  Stash& own = run.stash(action.chunk, action.micro_batch);
  own.outputs = run.chunk(action.chunk).forward(action.micro_batch, own.inputs);
  const int next = action.chunk + 1;
  if (next == run.shape.num_chunks()) {
    auto& result = run.results[static_cast<std::size_t>(action.micro_batch)];
    if (!own.outputs.empty()) result = own.outputs.front().detach();
  } else if (run.is_local(action.chunk, next)) {
    run.stash(next, action.micro_batch).inputs = detach_leaves(own.outputs);
    own.roots = roots_of(own.outputs);
    own.outputs.clear();
  }
}

void backward(RunState& run, const Action& action) {
  Stash own = std::exchange(run.stash(action.chunk, action.micro_batch), Stash{});
  if (action.chunk + 1 == run.shape.num_chunks()) {
    const std::vector<at::Tensor> losses = std::move(own.outputs);
    if (!losses.empty() && losses.front().requires_grad()) torch::autograd::backward(losses);
  } else {
    if (own.roots.size() != own.gradients.size()) {
      throw std::runtime_error(core::to_string(action) + ": " + std::to_string(own.gradients.size()) +
                               " gradients arrived for " + std::to_string(own.roots.size()) + " outputs");
    }
    if (!own.roots.empty()) run_graph(std::exchange(own.roots, {}), std::exchange(own.gradients, {}));
  }
  hand_back(run, action, own.inputs);
}

[[noreturn]] void refuse(RunState&, const Action& action) {
  throw std::invalid_argument("the executor runs whole backward passes; action " + core::to_string(action) +
                              " splits one: use a schedule of F and B actions");
}

void send(RunState& run, const Action& action) {
  Stash& own = run.stash(action.chunk, action.micro_batch);
  const bool is_forward = action.kind == Kind::kSendForward;
  comm::Tensors message;
  for (const at::Tensor& tensor : is_forward ? own.outputs : own.gradients) message.push_back(wrap(tensor));
  if (is_forward && run.backward) {
    own.roots = roots_of(own.outputs);
    own.outputs.clear();
  } else {
    own = Stash{};
  }
  run.communicator->send(action, std::move(message));
}

/// What arrives is taken by the action that waits for it; here the program only passes it.
void receive(RunState& run, const Action& action) { run.communicator->pass(action); }

void reduce(RunState& run, const Action& action) { run.chunk(action.chunk).reduce(); }

constexpr std::array<std::pair<Kind, Handler>, core::kNumKinds> kHandlers = {{
    {Kind::kForward, forward},
    {Kind::kBackward, backward},
    {Kind::kBackwardInput, refuse},
    {Kind::kBackwardWeight, refuse},
    {Kind::kSendForward, send},
    {Kind::kRecvForward, receive},
    {Kind::kSendBackward, send},
    {Kind::kRecvBackward, receive},
    {Kind::kReduce, reduce},
}};

constexpr bool in_order() {
  for (std::size_t k = 0; k < kHandlers.size(); ++k) {
    if (kHandlers[k].first != static_cast<Kind>(k)) return false;
  }
  return true;
}
static_assert(in_order(), "one handler for each Kind, in the order of the enumeration");

}  // namespace

Handler handler_of(Kind kind) { return kHandlers.at(static_cast<std::size_t>(kind)).second; }

}  // namespace fold3d::runtime
