// ZB-H1 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.3 and figure 3): the order of 1F1B with the
// backward split. I goes to the stage before at once; W follows s micro-batches later on stage s, so that the later
// stages, which begin later, have work for the end of the step. Of the bubble (pp - 1) (F + I + W) of 1F1B
// (pp - 1) (F + I - W) is left, and with a delay of s no stage stashes more than pp micro-batches, 1F1B's most.
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
    for (int i = 0; i < m + stage; ++i) {
      if (ahead + i < m) actions.push_back({stage, Kind::kForward, ahead + i});
      if (i < m) actions.push_back({stage, Kind::kBackwardInput, i});
      if (i >= stage) actions.push_back({stage, Kind::kBackwardWeight, i - stage});
    }
    schedule.ranks.push_back(std::move(actions));
  }
  return schedule;
}

}  // namespace

SchedulerInfo zb_h1() {
  return {.name = "zb_h1",
          .help = "1F1B with a split backward: about a third of its bubble, the same memory (ZB-H1)",
          .generate = generate};
}

}  // namespace fold3d::core::generators
