// Steps that follow each other without a flush: one list per stage, again and again.
#pragma once

#include <string>
#include <vector>

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

/// Returns what the ranks run of `steps` steps of one micro-batch each, an update after each (PipeDream): the lists of
/// 1F1B of all of them, cut on each stage behind the backward of the micro-batch that is as many behind as there are
/// stages after this one, with REDUCE_GRAD behind it; and pp - 1 lists more, of what is left. Micro-batches are
/// numbered modulo pp. Proven by validate(): complete, free of deadlock; and each forward finds the weights of
/// "stashing" and of "vertical_sync" (core/ir/versions.h) among the versions that its stage has.
///
/// Throws std::invalid_argument for numbers below 1.
std::vector<Schedule> by_micro_batch(int pp, int steps);

}  // namespace fold3d::core
