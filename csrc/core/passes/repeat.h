// Steps that follow each other without a flush: one list per stage, again and again.
#pragma once

#include <string>

#include "core/ir/schedule.h"

namespace fold3d::core {

/// What the ranks run of steps without a flush. Shape and numbers of micro-batches are those of one step.
struct Repeating {
  Schedule first;  ///< the step after a drain: `every` without what belongs to a step before
  Schedule every;  ///< every step; what belongs to the step before, see of_step_before(), is left of it
  Schedule drain;  ///< what is left of the last step
};

/// Returns schedule `name` without the flush at its end: that of several steps at once, cut on each stage after the
/// last forward of each step, with its messages, and with REDUCE_GRAD after the last backward of each step. Gradients
/// are taken a step later: version_waits() says what a step waits for. Proven by validate(): complete, the same in each
/// step, free of deadlock from the first step to the drain.
///
/// Throws std::invalid_argument for other schedules than "1f1b", and for fewer micro-batches than stages: backwards
/// would be left to more than the next step.
Repeating without_flush(const std::string& name, const Shape& shape);

}  // namespace fold3d::core
