// Chunk: one (segment, stage) cell of the model, as the Executor sees it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/node.h>

#include <memory>
#include <vector>

#include "runtime/offload/stash_batch.h"

namespace fold3d::runtime {

/// Consecutive layers that one rank runs as a unit. Called by the Executor's thread only.
class Chunk {
 public:
  virtual ~Chunk() = default;

  /// Runs the layers on one micro-batch. `inputs`: what the previous chunk returned (empty for chunk 0), leaves or
  /// views of leaves. `batch`: saves what the graph keeps, which leaves the device until the backward; null: it stays.
  /// Returns the tensors that go to the next chunk; for the last chunk the loss ([1] or scalar), and behind it what the
  /// model's last block returned, where that is known.
  virtual std::vector<at::Tensor> forward(int micro_batch, std::vector<at::Tensor> inputs,
                                          const std::shared_ptr<StashBatch>& batch) = 0;

  /// Likewise where recompute() will follow: of the outputs the values are used, and whether they require a gradient.
  /// `kept`: what recompute() needs beside the inputs, for the caller to hold; without history.
  virtual std::vector<at::Tensor> forward_first(int micro_batch, std::vector<at::Tensor> inputs,
                                                std::vector<at::Tensor>& kept) = 0;

  /// Does what forward_first did with the same inputs, for the graph: the same outputs come of it, and nothing is
  /// changed, drawn or counted twice. Returns outputs, or the loss alone.
  virtual std::vector<at::Tensor> recompute(int micro_batch, std::vector<at::Tensor> inputs,
                                            std::vector<at::Tensor> kept) = 0;

  /// In steps without a flush, before each action: it is of this micro-batch, and of this step or the step before,
  /// whose weights it takes.
  virtual void turn_to(int micro_batch, bool step_before) = 0;

  /// The chunk's last backward of the step is done: hand over for summation what was not handed over before.
  virtual void reduce() = 0;

  /// Whether reading what `node` of a forward's graph saved runs code that makes it anew: recomputation, or hooks of
  /// the user. What `batch` saved does not.
  virtual bool is_rebuilt(torch::autograd::Node& node) = 0;
};

}  // namespace fold3d::runtime
