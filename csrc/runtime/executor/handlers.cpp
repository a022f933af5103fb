#include "runtime/executor/handlers.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

#include "runtime/device/tensor_buffer.h"
#include "runtime/executor/backward_halves.h"
#include "runtime/executor/head_backward.h"

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

/// What a chunk sees in place of leaves whose memory will leave: who keeps one of these keeps the memory.
std::vector<at::Tensor> views_of(const std::vector<at::Tensor>& leaves) {
  std::vector<at::Tensor> views;
  views.reserve(leaves.size());
  for (const at::Tensor& leaf : leaves) views.push_back(leaf.requires_grad() ? leaf.view_as(leaf) : leaf);
  return views;
}

/// Has the shape of `leaf`, and hardly any memory. A gradient that is added up for it is laid out as for `leaf`:
/// kernels that read it may round in another order where it is not (channels_last).
at::Tensor placeholder_of(const at::Tensor& leaf) {
  if (leaf.is_contiguous() || !leaf.is_non_overlapping_and_dense()) {
    return at::empty({}, leaf.options()).expand(leaf.sizes());
  }
  at::Tensor placeholder = at::empty({0}, leaf.options());
  placeholder.unsafeGetTensorImpl()->set_sizes_and_strides(leaf.sizes(), leaf.strides());
  return placeholder;
}

/// Lets go of the leaves' memory: they are only where gradients arrive.
void let_go(std::vector<at::Tensor>& leaves) {
  const c10::NoGradGuard no_grad;
  for (at::Tensor& leaf : leaves) {
    if (leaf.requires_grad()) {
      leaf.set_data(placeholder_of(leaf));
    } else {
      leaf = at::Tensor();
    }
  }
}

torch::autograd::edge_list roots_of(const std::vector<at::Tensor>& outputs) {
  torch::autograd::edge_list roots;
  for (const at::Tensor& output : outputs) {
    if (output.requires_grad()) roots.push_back(torch::autograd::impl::gradient_edge(output));
  }
  return roots;
}

/// Gradients of those inputs that require one. Where nothing reached an input, as behind detach(), none: no element
/// travels for it, and weights in front of it that nothing else reaches have no gradient, as in one process. Zeros
/// would have optimizers move them, by weight decay say.
std::vector<at::Tensor> input_gradients(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& input : inputs) {
    if (!input.defined() || !input.requires_grad()) continue;
    gradients.push_back(input.grad().defined() ? input.grad() : at::empty({0}, input.options().requires_grad(false)));
  }
  return gradients;
}

/// Whether a gradient stands for none; that of a tensor without elements has none either.
bool is_none(const at::Tensor& gradient, const torch::autograd::Edge& root) {
  if (gradient.numel() > 0) return false;
  const auto shape = root.function->input_metadata(root.input_nr).shape_as_dim_vector();
  return std::none_of(shape.begin(), shape.end(), [](const c10::SymInt& size) { return size == 0; });
}

/// Leaves out roots for which there is no gradient.
BackwardStart with_gradients(BackwardStart start) {
  BackwardStart found;
  for (std::size_t k = 0; k < start.roots.size(); ++k) {
    if (is_none(start.gradients[k], start.roots[k])) continue;
    found.roots.push_back(std::move(start.roots[k]));
    found.gradients.push_back(std::move(start.gradients[k]));
  }
  return found;
}

/// A chunk's input gradients go to the chunk before: at once on this rank, else with SEND_B, the next action.
void hand_back(RunState& run, const Action& action, const std::vector<at::Tensor>& inputs) {
  const int previous = action.chunk - 1;
  if (previous < 0) return;
  const int holder = run.is_local(action.chunk, previous) ? previous : action.chunk;
  run.stash(holder, action.micro_batch).gradients = input_gradients(inputs);
}

/// The outputs have been handed on. Where they come from in the graph stays, if there is one.
void let_go_of_outputs(Stash& own) {
  if (!own.recomputes) own.roots = roots_of(own.outputs);
  own.outputs.clear();
}

/// A forward of the last chunk is over. If its backward is far, that of the head runs now: logits and what else the
/// head saved go, and the gradient of what the last block returned waits in their place.
void end_with_loss(RunState& run, const Action& action, Stash& own) {
  std::vector<at::Tensor> ends;  // of the body
  if (own.outputs.size() > 1) {
    ends.assign(std::make_move_iterator(own.outputs.begin() + 1), std::make_move_iterator(own.outputs.end()));
    own.outputs.resize(1);
  }
  if (!own.outputs.empty()) run.results[static_cast<std::size_t>(action.micro_batch)] = own.outputs.front().detach();
  if (own.recomputes) return own.outputs.clear();
  if (ends.empty() || !run.turns(action) || !own.outputs.front().requires_grad()) return;
  auto body = run_head_backward(own.outputs.front(), ends, own.inputs,
                                [&](torch::autograd::Node& node) { return run.chunk(action.chunk).is_rebuilt(node); });
  if (!body) return;
  own.outputs.clear();
  own.roots = std::move(body->roots);
  own.gradients = std::move(body->gradients);
  if (!own.batch) return;
  for (const at::Tensor& gradient : std::exchange(own.gradients, {})) {
    own.gradients_saved.push_back(own.batch->save(gradient));
  }
}

void forward(RunState& run, const Action& action) {
  Stash& own = run.stash(action.chunk, action.micro_batch);
  Chunk& chunk = run.chunk(action.chunk);
  if (own.recomputes) {
    own.outputs = detach_leaves(chunk.forward_first(action.micro_batch, own.inputs, own.kept));  // the graph goes
  } else if (run.leaves(action)) {
    own.batch = run.offloader->batch();
    own.outputs = chunk.forward(action.micro_batch, views_of(own.inputs), own.batch);
  } else {
    own.outputs = chunk.forward(action.micro_batch, own.inputs, nullptr);
  }
  const int next = action.chunk + 1;
  if (run.is_last(action.chunk)) {
    end_with_loss(run, action, own);
  } else if (run.is_local(action.chunk, next)) {
    run.stash(next, action.micro_batch).inputs = detach_leaves(own.outputs);
    let_go_of_outputs(own);
  }
  if (own.batch) run.offloader->stashed(*own.batch);
}

/// The batch is back: the tensors are the stash's again.
void take_back(Stash& own) {
  for (std::size_t k = 0; k < own.away.size(); ++k) {
    at::Tensor tensor = own.away[k].tensor();
    if (own.away_requires_grad[k]) tensor.set_requires_grad(true);
    (k < own.away_inputs ? own.inputs : own.kept).push_back(std::move(tensor));
  }
  own.away.clear();
}

void recompute(RunState& run, const Action& action) {
  Stash& own = run.stash(action.chunk, action.micro_batch);
  take_back(own);
  own.outputs = run.chunk(action.chunk).recompute(action.micro_batch, own.inputs, std::exchange(own.kept, {}));
  own.recomputes = false;
  if (action.chunk + 1 < run.shape.num_chunks()) let_go_of_outputs(own);
}

/// Takes from the stash where the action's backward begins: the chunk's loss, the outputs whose gradients arrived, or
/// what the head's backward came to.
BackwardStart start_of(const RunState& run, const Action& action, Stash& own) {
  BackwardStart start{std::exchange(own.roots, {}), std::exchange(own.gradients, {})};
  for (const SavedTensor& saved : std::exchange(own.gradients_saved, {})) start.gradients.push_back(saved.tensor());
  if (run.is_last(action.chunk)) {
    for (const at::Tensor& loss : std::exchange(own.outputs, {})) {
      if (!loss.requires_grad()) continue;
      start.roots.push_back(torch::autograd::impl::gradient_edge(loss));
      start.gradients.push_back(at::ones_like(loss));
    }
  }
  if (start.roots.size() != start.gradients.size()) {
    throw std::runtime_error(core::to_string(action) + ": " + std::to_string(start.gradients.size()) +
                             " gradients arrived for " + std::to_string(start.roots.size()) + " outputs");
  }
  return with_gradients(std::move(start));
}

void backward(RunState& run, const Action& action) {
  Stash own = std::exchange(run.stash(action.chunk, action.micro_batch), Stash{});
  run_backward(start_of(run, action, own));
  hand_back(run, action, own.inputs);
}

void backward_input(RunState& run, const Action& action) {
  Stash& own = run.stash(action.chunk, action.micro_batch);
  const std::vector<at::Tensor> inputs = std::exchange(own.inputs, {});
  own.weight_half = run_input_half(start_of(run, action, own), inputs, [&](torch::autograd::Node& node) {
    return run.chunk(action.chunk).is_rebuilt(node);
  });
  hand_back(run, action, inputs);
}

void backward_weight(RunState& run, const Action& action) {
  Stash own = std::exchange(run.stash(action.chunk, action.micro_batch), Stash{});
  run_backward(std::move(own.weight_half));
}

void send(RunState& run, const Action& action) {
  Stash& own = run.stash(action.chunk, action.micro_batch);
  const bool is_forward = action.kind == Kind::kSendForward;
  comm::Tensors message;
  for (const at::Tensor& tensor : is_forward ? own.outputs : own.gradients) message.push_back(wrap(tensor));
  if (!is_forward) {
    own.gradients.clear();  // what W needs stays
  } else if (run.backward) {
    let_go_of_outputs(own);
  } else {
    own = Stash{};
  }
  run.communicator->send(action, std::move(message));
}

/// What arrives is taken by the action that waits for it; here the program only passes it.
void receive(RunState& run, const Action& action) { run.communicator->pass(action); }

/// What a recomputed stash holds is the batch's from now on.
void put_away(RunState& run, Stash& own) {
  own.batch = run.offloader->batch();
  for (std::vector<at::Tensor>* const tensors : {&own.inputs, &own.kept}) {
    for (const at::Tensor& tensor : *tensors) {
      own.away.push_back(own.batch->save(tensor.detach()));
      own.away_requires_grad.push_back(tensor.requires_grad());
    }
  }
  own.away_inputs = own.inputs.size();
  own.inputs.clear();
  own.kept.clear();
  run.offloader->stashed(*own.batch);
}

void offload(RunState& run, const Action& action) {
  Stash& own = run.stash(action.chunk, action.micro_batch);
  if (own.recomputes) {
    put_away(run, own);
  } else {
    let_go(own.inputs);
  }
  run.offloader->leave(own.batch, action);
}

void prefetch(RunState& run, const Action& action) {
  run.offloader->come(run.stash(action.chunk, action.micro_batch).batch, action);
}

/// What chunk `action.chunk` will take of its neighbour on this rank goes to the pool.
void offload_border(RunState& run, const Action& action) {
  Stash& own = run.stash(action.chunk, action.micro_batch);
  const bool forward = action.kind == Kind::kOffloadForward;
  std::vector<at::Tensor>& tensors = forward ? own.inputs : own.gradients;
  Parcel parcel{run.offloader->batch(), {}, {}};
  for (const at::Tensor& tensor : tensors) parcel.add(parcel.batch->save(tensor.detach()), tensor.requires_grad());
  tensors.clear();
  run.offloader->stashed(*parcel.batch);
  run.offloader->leave(parcel.batch, action);
  (forward ? own.inputs_away : own.gradients_away) = std::move(parcel);
}

/// What was made here comes back. A message is fetched if it is there, else by the action that waits for it: nothing
/// before that has to wait.
void prefetch_border(RunState& run, const Action& action) {
  Stash& own = run.stash(action.chunk, action.micro_batch);
  const bool forward = action.kind == Kind::kPrefetchForward;
  if (const Parcel& parcel = forward ? own.inputs_away : own.gradients_away) {
    return run.offloader->come(parcel.batch, action);
  }
  const Action recv{action.chunk, forward ? Kind::kRecvForward : Kind::kRecvBackward, action.micro_batch};
  if (run.communicator->has_arrived(recv)) fetch_message(run, recv, run.communicator->wait(recv));
}

void reduce(RunState& run, const Action& action) { run.chunk(action.chunk).reduce(); }

constexpr std::array<std::pair<Kind, Handler>, core::kNumKinds> kHandlers = {{
    {Kind::kForward, forward},
    {Kind::kBackward, backward},
    {Kind::kBackwardInput, backward_input},
    {Kind::kBackwardWeight, backward_weight},
    {Kind::kSendForward, send},
    {Kind::kRecvForward, receive},
    {Kind::kSendBackward, send},
    {Kind::kRecvBackward, receive},
    {Kind::kReduce, reduce},
    {Kind::kRecompute, recompute},
    {Kind::kOffload, offload},
    {Kind::kPrefetch, prefetch},
    {Kind::kOffloadForward, offload_border},
    {Kind::kPrefetchForward, prefetch_border},
    {Kind::kOffloadBackward, offload_border},
    {Kind::kPrefetchBackward, prefetch_border},
}};

constexpr bool in_order() {
  for (std::size_t k = 0; k < kHandlers.size(); ++k) {
    if (kHandlers[k].first != static_cast<Kind>(k)) return false;
  }
  return true;
}
static_assert(in_order(), "one handler for each Kind, in the order of the enumeration");

}  // namespace

void fetch_message(RunState& run, const Action& recv, const comm::Tensors& message) {
  const bool forward = recv.kind == Kind::kRecvForward;
  Stash& own = run.stash(recv.chunk, recv.micro_batch);
  Parcel& parcel = forward ? own.inputs_away : own.gradients_away;
  parcel = run.offloader->landed(message);
  const Kind prefetch = forward ? Kind::kPrefetchForward : Kind::kPrefetchBackward;
  run.offloader->come(parcel.batch, {recv.chunk, prefetch, recv.micro_batch});
}

Handler handler_of(Kind kind) { return kHandlers.at(static_cast<std::size_t>(kind)).second; }

}  // namespace fold3d::runtime
