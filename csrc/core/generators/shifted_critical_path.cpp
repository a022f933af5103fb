// Merak's shifted critical path (Lai et al. 2023, section 5.1): 1F1B for stages that compute their forwards again. The
// last stage does not, as each of its backwards follows its own forward, so it has less to do than the others, and the
// stage before it decides how long the step takes. That one runs its third forward before its first backward, in the
// time in which it would wait for the last stage. With B = 2 F the bubble is (pp - 2) 3 F. Of Merak's way there from
// 1F1B's (pp - 1) 4 F this is the last piece, one forward: passes/recompute.cpp computes again before the gradient is
// there, and not where a backward follows its own forward.
#include <utility>

#include "core/generators/registry.h"

namespace fold3d::core::generators {
namespace {

Schedule generate(const Params& params) {
  Schedule schedule = core::generate("1f1b", params);
  const auto& [pp, segments, m, style] = params.shape;
  if (pp == 1 || m < 3) return schedule;
  auto& actions = schedule.ranks[static_cast<std::size_t>(pp - 2)];
  std::swap(actions[2], actions[3]);  // F0 F1 B0 F2 B1 F3 ... becomes F0 F1 F2 B0 B1 F3 ...
  return schedule;
}

}  // namespace

SchedulerInfo shifted_critical_path() {
  return {.name = "shifted_critical_path",
          .help = "1F1B for stages that recompute: the last but one, not the last, sets the pace (Merak)",
          .generate = generate};
}

}  // namespace fold3d::core::generators
