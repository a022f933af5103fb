// 1F1B with a flush at the end of the step (PipeDream-Flush, Narayanan et al. 2021, section 2.2): stage s
// runs pp-1-s forwards ahead, then alternates one forward and one backward, so at most pp-s micro-batches are
// stashed. The file to copy for a new schedule.
#include <algorithm>

#include "core/generators/registry.h"

namespace fold3d::core::generators {
namespace {

Schedule generate(const Params& params) {
  const auto& [pp, segments, m, style] = params.shape;
  Schedule schedule{params.shape, {}};
  for (int stage = 0; stage < pp; ++stage) {
    const int ahead = std::min(pp - 1 - stage, m);
    std::vector<Action> actions;
    for (int i = 0; i < ahead; ++i) actions.push_back({stage, Kind::kForward, i});
    for (int i = 0; i < m; ++i) {
      if (ahead + i < m) actions.push_back({stage, Kind::kForward, ahead + i});
      actions.push_back({stage, Kind::kBackward, i});
    }
    schedule.ranks.push_back(std::move(actions));
  }
  return schedule;
}

}  // namespace

SchedulerInfo one_f_one_b() {
  return {.name = "1f1b",
          .help = "one forward, one backward; stashes at most pp micro-batches (PipeDream-Flush)",
          .generate = generate};
}

}  // namespace fold3d::core::generators
