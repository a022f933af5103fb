// Weight versions of steps that follow each other without a flush (PipeDream-2BW, Narayanan et al. 2021, section 3.1).
#pragma once

#include <vector>

#include "core/ir/deps.h"
#include "core/ir/schedule.h"

namespace fold3d::core {

/// Of each of a stage's `actions`, a list that repeats without a flush: whether it belongs to the step before. So do a
/// backward that stands before its forward, and what goes with it: its messages, and the chunk's REDUCE_GRAD, which
/// ends a step. None does in a list with a flush. Actions outside the shape are ignored.
std::vector<bool> of_step_before(const Shape& shape, const std::vector<Action>& actions);

/// Steps of `micro_batches` each, one after the other in one schedule; every step runs, in both passes and on all
/// stages, on the weights with the updates of all steps but the one before it. Returns what `action`, if it is a
/// forward, waits for by that: the last backwards of the step before the one before on every chunk, since an update
/// needs the norm of all of its gradients.
std::vector<Action> version_waits(const Shape& shape, const Action& action, int micro_batches,
                                  const OptionalActions& present);

}  // namespace fold3d::core
