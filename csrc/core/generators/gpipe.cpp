// GPipe (Huang et al. 2019): all forwards, then all backwards. Simple, and every micro-batch is stashed at
// the turn.
#include "core/generators/registry.h"

namespace fold3d::core::generators {
namespace {

Schedule generate(const Params& params) {
  Schedule schedule{params.shape, {}};
  for (int stage = 0; stage < params.shape.pp; ++stage) {
    std::vector<Action> actions;
    for (int i = 0; i < params.shape.micro_batches; ++i) actions.push_back({stage, Kind::kForward, i});
    for (int i = 0; i < params.shape.micro_batches; ++i) actions.push_back({stage, Kind::kBackward, i});
    schedule.ranks.push_back(std::move(actions));
  }
  return schedule;
}

}  // namespace

SchedulerInfo gpipe() {
  return {.name = "gpipe", .help = "all forwards, then all backwards (GPipe)", .generate = generate};
}

}  // namespace fold3d::core::generators
