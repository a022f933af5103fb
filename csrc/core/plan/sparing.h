#pragma once

#include <cstdint>
#include <functional>
#include <optional>
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

/// How plans that spare are judged.
struct Judge {
  std::function<Programs::Look(const Spared&)> look;
  /// Whether a stage has room.
  std::function<bool(const StagePeak&)> fits;
  /// Whether what spares so much or more is known to be too slow, which ends the search.
  std::function<bool(const Spared&)> hopeless;
  std::int64_t least_ns = 0;  ///< a step of the plan that spares nothing

  bool all_fit(const Spared& spared) const;
};

// Each returns what it finds; nothing where even the most does not fit, or what fits is hopeless.

/// The lowest rungs with which every stage fits; where copies make a step longer, higher ones with fewer copies that
/// make it shorter.
std::optional<Spared> climb(const Ladder& ladder, const Judge& judge);

/// Likewise from the other end, chunk by chunk: what all need not do, one after the other stops doing. Chunks that
/// differ in size are told apart so.
std::optional<Spared> thin(const Ladder& ladder, const Judge& judge);

/// The least share of micro-batches whose stashes must leave so that every stage fits. spared: of all micro-batches.
std::optional<Spared> lighten(const PlanJob& job, const Spared& spared, const Judge& judge);

}  // namespace fold3d::core
