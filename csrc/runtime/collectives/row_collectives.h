// A reduce-scatter and an all-gather of what lies in as many places as there are replicas.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace fold3d::runtime {

/// Both take `rows` [ranks of the group, length], each row contiguous, wherever it lies; row r belongs to rank r. They
/// work in place: nothing is copied, and no memory is needed. All ranks of the group must call them, in one order, with
/// rows of the same length. When they return the current stream waits for the result, on the CPU the host has waited.
///
/// A library takes what lies in one place; so there is one collective to or from each rank, all of them in one launch
/// where the library can do that (NCCL's groups, as torch has it for shards of different sizes). Together these move
/// what the library's own would, and add in the order of its rings. Elsewhere (gloo) they run beside each other.

/// Row r becomes the sum of all ranks' on rank r. Of the other rows nothing is known afterwards.
void reduce_scatter_rows(c10d::ProcessGroup& group, const at::Tensor& rows);

/// Row r becomes that of rank r on all ranks, which only reads it, so others may read it meanwhile.
void all_gather_rows(c10d::ProcessGroup& group, const at::Tensor& rows);

}  // namespace fold3d::runtime
