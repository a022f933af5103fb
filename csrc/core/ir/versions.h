// Weight versions of steps that follow each other without a flush (PipeDream-2BW, Narayanan et al. 2021, section 3.1),
// and of an update after each micro-batch (PipeDream, Narayanan et al. 2019, section 3.3).
#pragma once

#include <cstdint>
#include <string_view>
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

/// Which weights a micro-batch takes, in both of its passes.
enum class VersionRule : std::uint8_t {
  kTwo,           ///< "2bw": an update for each step, taken by the next step but one
  kStashing,      ///< "stashing": an update for each micro-batch; the newest that a stage has before the forward
  kVerticalSync,  ///< "vertical_sync": likewise, but on all stages what the first one has
};

/// Inverse of the names above. Throws std::invalid_argument naming the text and the names.
VersionRule parse_version_rule(std::string_view text);

/// How many updates the weights of `stage` have that micro-batch `micro_batch` takes, both counted from 0 since the
/// beginning. `shape`: pp, and for "2bw" the micro-batches of a step.
int version_of(VersionRule rule, const Shape& shape, int stage, int micro_batch);

/// How many versions a stage has at most at one time, the newest included.
int live_versions(VersionRule rule, const Shape& shape, int stage);

}  // namespace fold3d::core
