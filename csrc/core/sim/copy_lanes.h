#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "core/ir/schedule.h"
#include "core/sim/cluster_model.h"
#include "core/sim/simulate.h"

namespace fold3d::core {

/// A rank's copies to the pool and back, as the Executor makes them: each direction in the order of the program, beside
/// the computation; an OFFLOAD begins when the last but one is done (kOffloadsUnderWay), those of borders for
/// themselves.
class CopyLanes {
 public:
  CopyLanes(const Shape& shape, const ClusterModel& model);

  /// The rank comes to a copy at `now`; returns when it may go on. `spans`: gets the copy; may be null.
  std::int64_t begin(std::int64_t now, int rank, const Action& action, std::vector<SimulatedSpan>* spans);

  /// Whether a PREFETCH has begun, and nobody has taken what it brings.
  bool is_coming(const Action& prefetch) { return moved(prefetch).comes; }
  /// When what `prefetch` brings is there; somebody takes it.
  std::int64_t take(const Action& prefetch);

 private:
  /// A stash, or what crosses a border.
  struct Moved {
    std::int64_t left = 0, back = 0;
    bool comes = false;
  };

  Moved& moved(const Action& copy);

  const Shape shape_;
  const ClusterModel& model_;
  std::int64_t out_free_ = 0, in_free_ = 0;
  std::deque<std::int64_t> stashes_leaving_, borders_leaving_;  // when the OFFLOADs under way are done
  std::array<std::vector<Moved>, 3> moved_;  // [stash, input, gradient][segment * micro_batches + micro_batch]
};

}  // namespace fold3d::core
