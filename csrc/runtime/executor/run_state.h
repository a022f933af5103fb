// What the actions of one run hand to each other.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <array>
#include <memory>
#include <vector>

#include "comm/p2p/communicator.h"
#include "core/ir/schedule.h"
#include "runtime/executor/backward_halves.h"
#include "runtime/executor/chunk.h"
#include "runtime/offload/offloader.h"

namespace fold3d::runtime {

/// One micro-batch on one chunk between its forward and its backward. `outputs`: until they are handed on, and the
/// last chunk's until its backward. `roots`: where the gradients of those outputs that require one go into the graph,
/// which keeps of the outputs what it needs itself. `weight_half`: what is left of a split backward between I and W.
/// With `recomputes` there is no graph before RECOMPUTE: the inputs stay, and what the chunk wants `kept`; from OFFLOAD
/// on they are `away`. `batch`: what moves, if anything does. `inputs_away`, `gradients_away`: what waits in the pool
/// before it becomes `inputs` or `gradients`. Where the head's backward has run, `roots` and `gradients` are where the
/// body's begins; with a batch, `gradients_saved` in the place of `gradients`.
struct Stash {
  bool recomputes = false;
  std::vector<at::Tensor> inputs, kept, outputs, gradients;
  torch::autograd::edge_list roots;
  BackwardStart weight_half;
  std::shared_ptr<StashBatch> batch;
  std::vector<SavedTensor> away;  // inputs, then what was kept
  std::vector<bool> away_requires_grad;
  std::size_t away_inputs = 0;  // of away
  std::vector<SavedTensor> gradients_saved;
  Parcel inputs_away, gradients_away;
};

struct RunState {
  core::Shape shape{};
  bool backward = true;
  comm::Communicator* communicator = nullptr;  // null when the rank talks to nobody
  Offloader* offloader = nullptr;              // null when nothing leaves the device
  std::vector<std::shared_ptr<Chunk>> chunks;  // [segment]
  std::vector<Stash> stashes;                  // [segment * micro_batches + micro_batch]
  std::vector<at::Tensor> results;             // [micro_batch], on the last stage
  std::vector<bool> leaving;                   // as stashes: whether the program has its OFFLOAD
  std::array<std::vector<bool>, 2> landing;    // as stashes: whether it has PREFETCH_F; PREFETCH_B
  std::vector<bool> turning_heads;             // [micro_batch], on the last stage; see core/passes/head.h

  Stash& stash(int chunk, int micro_batch) { return stashes[number_of(chunk, micro_batch)]; }
  /// Whether what a RECV brings waits in the pool.
  bool lands(const core::Action& recv) const {
    return landing[recv.kind == core::Kind::kRecvForward ? 0 : 1][number_of(recv.chunk, recv.micro_batch)];
  }
  bool leaves(const core::Action& action) const { return leaving[number_of(action.chunk, action.micro_batch)]; }
  std::size_t number_of(int chunk, int micro_batch) const {
    return static_cast<std::size_t>(chunk / shape.pp * shape.micro_batches + micro_batch);
  }
  Chunk& chunk(int number) { return *chunks[static_cast<std::size_t>(number / shape.pp)]; }
  bool is_last(int number) const { return number + 1 == shape.num_chunks(); }
  /// Whether a forward goes on with the head's backward.
  bool turns(const core::Action& forward) const {
    return is_last(forward.chunk) && turning_heads.at(static_cast<std::size_t>(forward.micro_batch));
  }
  bool is_local(int number, int other) const { return shape.stage_of(number) == shape.stage_of(other); }
};

}  // namespace fold3d::runtime
