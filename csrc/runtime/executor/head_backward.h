// The backward of a model's head, run by itself: what a graph computes behind the last block, down to the block's
// results. What the head saved, logits above all, is freed; the gradients of those results wait for the body's
// backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/node.h>

#include <functional>
#include <optional>
#include <vector>

#include "runtime/executor/backward_halves.h"

namespace fold3d::runtime {

/// Differentiates what leads from `ends` to `loss`, and returns where the body's backward begins. The body is what
/// `ends`, the last block's results, were computed from; the head all else, also what it reads of the body beside the
/// ends: the loss of a router, say. Gradients of its leaves accumulate in .grad; one run here and one of what is
/// returned add the same numbers in the same order as one run from the loss.
///
/// Nothing, and nothing is changed, where the two cannot be parted: head and body share a leaf other than `inputs`,
/// whose gradient would accumulate twice, or something of the head is computed anew (`is_rebuilt`, as for
/// run_input_half), perhaps with a part of the body. `loss` requires a gradient.
std::optional<BackwardStart> run_head_backward(const at::Tensor& loss, const std::vector<at::Tensor>& ends,
                                               const std::vector<at::Tensor>& inputs,
                                               const std::function<bool(torch::autograd::Node&)>& is_rebuilt);

}  // namespace fold3d::runtime
