#pragma once

#include <functional>
#include <vector>

#include "core/plan/candidate.h"
#include "core/plan/spared.h"

namespace fold3d::core {

// What makes a plan fit with as little recomputation and as few copies as that takes.
//
// That is stage-aware (Merak, section 5.2): earlier stages keep more micro-batches, so they compute more again. Of a
// stage the first chunks come first, whose activations are kept longest; where the others' leave the device, all chunks
// compute a little again. And of the micro-batches a share may leave, the least that it takes: so copies that are too
// slow for all of them hide.

/// Ways of sparing memory, each rung of which takes more time than the one below it, for each stage by itself.
struct Ladder {
  Shape shape;
  std::vector<Choice> steps;  ///< of a chunk; none: what is recomputed is fixed
  Spared spared;              ///< what leaves the device, and the fixed recomputation

  int top() const { return static_cast<int>(steps.size()) * shape.segments; }
  /// What stands on a rung of each stage.
  Spared at(const std::vector<int>& rungs) const;
  Spared highest() const { return at(std::vector<int>(static_cast<std::size_t>(shape.pp), top())); }
};

/// What a user leaves open of sparing.
struct SparingSpace {
  Spared fixed;  ///< nothing of what is free
  bool again_is_free = true;
  bool leaving_is_free = true;
};

/// What is to be tried with so many chunks; those without copies first.
std::vector<Ladder> ladders(const PlanJob& job, const SparingSpace& space, int chunks);

/// A plan that spares so.
using TrySpared = std::function<const Candidate&(const Spared&)>;
using Fits = std::function<bool(const StagePeak&)>;

/// Looks for the lowest rungs with which every stage fits, and, where copies make a step longer, for higher ones with
/// fewer copies that make it shorter; what it looks at, `tried` notes. least_ns: of a step of the plan that spares
/// nothing. `hopeless`: whether what spares so much or more is known to be too slow, which ends the search.
void climb(const Ladder& ladder, const TrySpared& tried, const Fits& fits, std::int64_t least_ns,
           const std::function<bool(const Spared&)>& hopeless);

/// Likewise from the other end, chunk by chunk: what all need not do, one after the other stops doing. Chunks that
/// differ in size are told apart so.
void thin(const Ladder& ladder, const TrySpared& tried, const Fits& fits,
          const std::function<bool(const Spared&)>& hopeless);

/// Looks for the least share of micro-batches whose stashes must leave so that every stage fits, where those of all
/// would do. spared: of all micro-batches.
void lighten(const PlanJob& job, const Spared& spared, const TrySpared& tried, const Fits& fits);

}  // namespace fold3d::core
