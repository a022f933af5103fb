// A backward pass in two halves: I, the gradients of a chunk's inputs, and W, the gradients of its weights.
//
// I runs the nodes from which an input is reached, each for its gradients on the way there alone, and keeps what
// arrives at the nodes where ways to weights part from it; they stay, the others are freed. W takes it up at those
// nodes, with the ways to the inputs cut off, so that no gradient is computed twice and AccumulateGrad's hooks run as
// always: once for each weight, in one run of the engine. (torch.distributed.pipelining's stage_backward_input, Qi et
// al. 2023 section 3, runs the engine once for each group of weights.)
//
// A node where ways part is not run in halves if that would show: its code is the user's, it has hooks, or reading what
// it saved computes it anew (checkpointing). All weights that it leads to then get their gradients in I.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/node.h>

#include <functional>
#include <vector>

namespace fold3d::runtime {

/// Where a run of autograd's engine begins, and the gradients that arrive there.
struct BackwardStart {
  torch::autograd::edge_list roots;
  std::vector<at::Tensor> gradients;
};

/// Runs all that is left of a graph, and frees it. Gradients accumulate in the .grad of its leaves.
void run_backward(BackwardStart start);

/// Runs the half that leads to those of `inputs`, leaves, that require a gradient; theirs accumulate in .grad. Returns
/// where the other half begins: everything, if no input requires a gradient, nothing, if no weight is left.
/// `is_rebuilt`: whether reading what a node saved in the forward computes it anew.
BackwardStart run_input_half(BackwardStart start, const std::vector<at::Tensor>& inputs,
                             const std::function<bool(torch::autograd::Node&)>& is_rebuilt);

}  // namespace fold3d::runtime
