#pragma once

#include <vector>

#include "core/ir/schedule.h"

namespace fold3d::core {

/// What actions cost, in any one unit of time.
struct Costs {
  double forward = 1;   ///< F of one chunk on one micro-batch
  double backward = 2;  ///< B of the same; I and W take half of it each
  double send = 0;      ///< end of an action until another stage may use its result; overlaps with compute
};

/// One compute action on the time axis of the step.
struct Span {
  Action action;
  double start = 0;
  double end = 0;
};

struct Timeline {
  std::vector<std::vector<Span>> ranks;  ///< compute actions in schedule order
  double makespan = 0;                   ///< end of the last action
  double busy = 0;                       ///< compute time of the busiest rank

  /// Idle time of the busiest rank over its compute time: the papers' bubble, (p-1)/m for 1F1B,
  /// (p-1)/(segments m) interleaved.
  double bubble() const { return busy > 0 ? (makespan - busy) / busy : 0; }
};

/// Starts every compute action as soon as its rank is free and what it waits for is there. SEND, RECV and
/// REDUCE, OFFLOAD and PREFETCH cells are passed over: transfers cost Costs::send and nothing waits for DP.sync. Throws
/// std::invalid_argument if an action can never start; run validate() first to be told which one.
Timeline unit_timeline(const Schedule& schedule, const Costs& costs = {});

}  // namespace fold3d::core
