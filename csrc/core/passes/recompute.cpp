// RECOMPUTE right before the backward (B, or I of a split one) of a chunk that keeps no graph between. It needs no
// gradient, so it runs while that is still on its way (Merak, section 5.1).
//
// Where a forward is followed by its own backward, as at the turn of 1F1B, nothing is freed in between: the forward
// keeps its graph, and there is no RECOMPUTE.
#include <optional>

#include "core/ir/deps.h"
#include "core/passes/pass.h"

namespace fold3d::core {

Schedule passes::recompute(const Schedule& lowered, const LoweringOptions& options) {
  if (options.recompute.empty()) return lowered;
  const OptionalActions present(lowered);
  Schedule made{lowered.shape, {}};
  for (const auto& before : lowered.ranks) {
    auto& actions = made.ranks.emplace_back();
    std::optional<Action> computed_last;
    for (const Action& action : before) {
      const auto& [chunk, kind, i] = action;
      if (is_compute(kind)) {
        const bool begins_backward = action == present.input_gradient(chunk, i);
        const bool turns = computed_last == Action{chunk, Kind::kForward, i};
        if (begins_backward && !turns && options.recompute[static_cast<std::size_t>(chunk)]) {
          actions.push_back({chunk, Kind::kRecompute, i});
        }
        computed_last = action;
      }
      actions.push_back(action);
    }
  }
  return made;
}

}  // namespace fold3d::core
