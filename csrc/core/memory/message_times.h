#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/ir/action_table.h"
#include "core/ir/schedule.h"
#include "core/sim/simulate.h"

namespace fold3d::core {

/// When an action of a stage's list ran.
struct ActionTime {
  Action action;
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;
};

/// Per stage its compute actions in order, of a simulated step with spans, from the beginning of the step: those of the
/// first replica. A forward that was interrupted by DP.sync runs from its first to its last part.
std::vector<std::vector<ActionTime>> compute_times(const TrainingStep& step, const Shape& shape);

/// Per stage the copies of its stashes to the pool and back, OFFLOAD and PREFETCH, of a simulated step with spans, as
/// `compute_times`; none where the model says that copies are free.
std::vector<std::vector<ActionTime>> copy_times(const TrainingStep& step, const Shape& shape);

/// A message between two stages, in memory of both.
struct Message {
  int from_stage = 0;
  int to_stage = 0;
  Action from;                 ///< that made it
  Action to;                   ///< that takes it
  std::int64_t made_ns = 0;    ///< lies in the sender's memory from here to `there_ns`
  std::int64_t begins_ns = 0;  ///< lies in the receiver's from here to `taken_ns`
  std::int64_t there_ns = 0;
  std::int64_t taken_ns = 0;
};

/// All messages of the step. The queue of a direction sends in the order in which it was filled, and not before the
/// receiver lets it: a receive may run `receive_ahead` messages before the receiver's program (Communicator), those
/// that land in the pool any number; `lands`: asked with the action that takes a message; none: no message does.
/// Messages need no time of their own: that the simulator has added to the waits of who takes them.
std::vector<Message> message_times(const Shape& shape, const std::vector<std::vector<ActionTime>>& times,
                                   int receive_ahead, const std::function<bool(const Action&)>& lands = {});

}  // namespace fold3d::core
