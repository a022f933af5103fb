#pragma once

#include "core/ir/schedule.h"

namespace fold3d::core {

/// Adds the communication to a compute-only schedule: a SEND right after each action whose result another
/// stage needs, its RECV in the receiver's list, and, if `reduce`, REDUCE_GRAD (DP.sync of the chunk) right
/// after the last backward of each chunk. REDUCE_GRAD cells already there are dropped first: the flag
/// decides.
///
/// The schedule is simulated (F = 1, B = 2) and its actions are taken in the total order (end time, rank);
/// SEND and RECV enter both lists at the moment their producer ends. Every rank's list is thus a projection
/// of one total order: no deadlock even if SEND and RECV block until they meet, and on each link the RECVs
/// come in the order of the SENDs.
///
/// A schedule without any backward is taken as forward-only (evaluation); it must not be asked to reduce.
/// Throws std::invalid_argument (with the grid) if the schedule is not valid, or already has SEND or RECV.
Schedule lower(const Schedule& compute_only, bool reduce);

}  // namespace fold3d::core
