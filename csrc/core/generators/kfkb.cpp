// kFkB (Ada-Grouper, Wang et al. 2023, section 4): groups of k micro-batches that follow each other pass the pipeline
// in the order of 1F1B, and each stage runs a group's micro-batches one after the other, k forwards, then k backwards.
// While it runs them, what the first ones sent is on its way, so a transfer may take k - 1 forwards before anybody
// waits for it. k = 1 is 1F1B, k >= m GPipe. Where k does not divide m the last group is smaller: no stage ever stashes
// more than k (pp - stage) micro-batches, and at most m.
#include <algorithm>

#include "core/generators/registry.h"

namespace fold3d::core::generators {
namespace {

constexpr int kDefaultK = 2;  // the least that differs from 1F1B

Schedule generate(const Params& params) {
  const int m = params.shape.micro_batches;
  const int k = std::min(params.group_size == 0 ? kDefaultK : params.group_size, m);
  Schedule schedule = core::generate("1f1b", {{params.shape.pp, 1, (m + k - 1) / k}, 0, ""});
  schedule.shape = params.shape;
  for (auto& actions : schedule.ranks) {
    std::vector<Action> one_by_one;
    for (const auto& [chunk, kind, group] : actions) {
      for (int i = group * k; i < std::min((group + 1) * k, m); ++i) one_by_one.push_back({chunk, kind, i});
    }
    actions = std::move(one_by_one);
  }
  return schedule;
}

}  // namespace

SchedulerInfo kfkb() {
  return {.name = "kfkb",
          .help =
              "k forwards, then k backwards, k = group_size (default 2): 1F1B that slow messages hold up less "
              "(Ada-Grouper)",
          .uses_group_size = true,
          .generate = generate};
}

}  // namespace fold3d::core::generators
