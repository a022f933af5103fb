#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "core/ir/schedule.h"
#include "core/sim/cluster_model.h"
#include "core/sim/simulate.h"

namespace fold3d::core {

/// A rank's copies to the pool and back, as the Executor makes them: each direction in the order of the program, beside
/// the computation; an OFFLOAD begins when the last but one is done (kOffloadsUnderWay).
class CopyLanes {
 public:
  CopyLanes(const Shape& shape, const ClusterModel& model);

  /// The rank comes to OFFLOAD or PREFETCH `action` at `now`; returns when it may go on. `spans`: gets the copy; may be
  /// null.
  std::int64_t begin(std::int64_t now, int rank, const Action& action, std::vector<SimulatedSpan>* spans);

  /// When what the last PREFETCH of the action's stash brought is there.
  std::int64_t back(const Action& action) const { return back_[number_of(action)]; }

 private:
  std::size_t number_of(const Action& action) const;

  const Shape shape_;
  const ClusterModel& model_;
  std::int64_t out_free_ = 0, in_free_ = 0;
  std::deque<std::int64_t> leaving_;  // when the OFFLOADs under way are done
  std::vector<std::int64_t> left_, back_;
};

}  // namespace fold3d::core
