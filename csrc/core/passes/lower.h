#pragma once

#include "core/ir/schedule.h"
#include "core/passes/pass.h"

namespace fold3d::core {

/// Adds to a compute-only schedule all that is not computing, by the passes of core/passes/pass.h: a SEND right after
/// each action whose result another stage needs, its RECV in the receiver's list, and what `options` ask for: RECOMPUTE
/// before backwards, REDUCE_GRAD (DP.sync of the chunk) right after the last backward of each chunk, OFFLOAD and
/// PREFETCH of stashes and of what crosses chunk borders. REDUCE_GRAD cells already there are dropped first: the
/// options decide. The result has no deadlock even if SEND and RECV block until they meet.
///
/// A schedule without any backward is taken as forward-only (evaluation); it must not be asked to reduce.
/// Throws std::invalid_argument if the schedule is not valid (with the grid), already has SEND, RECV or RECOMPUTE, or
/// does not fit the options.
Schedule lower(const Schedule& compute_only, const LoweringOptions& options);

}  // namespace fold3d::core
