// What a chunk takes from another one and does not use soon waits in the pool (lazy inter-segment communication, Fold3D
// V-C): PREFETCH_F or PREFETCH_B some compute actions ahead of its use. A message lands in the pool right away; what
// was made on the same rank leaves for it by OFFLOAD_F or OFFLOAD_B, right after the action that made it.
//
// What is used soon stays on the device, by the rule of stashes (kSoon).
#include <algorithm>

#include "core/ir/stash.h"
#include "core/passes/pass.h"

namespace fold3d::core {
namespace {

std::vector<Action> with_copies(const Shape& shape, const std::vector<Action>& actions,
                                const LoweringOptions& options) {
  std::vector<std::size_t> compute;  // positions
  std::vector<std::size_t> number(actions.size());
  for (std::size_t at = 0; at < actions.size(); ++at) {
    number[at] = compute.size();
    if (is_compute(actions[at].kind)) compute.push_back(at);
  }
  std::vector<BorderUse> uses = border_uses(shape, actions);
  const auto wait = [&](const BorderUse& use) {
    const std::size_t made_by = use.is_message ? 0 : 1;  // a compute action
    return number[use.use] - number[use.there] - made_by;
  };
  std::erase_if(uses, [&](const BorderUse& use) { return wait(use) < passes::kSoon; });
  std::sort(uses.begin(), uses.end(), [](const BorderUse& a, const BorderUse& b) { return a.use < b.use; });
  std::vector<std::vector<Action>> before(actions.size());
  for (const BorderUse& use : uses) {
    const Kind prefetch = use.is_gradient ? Kind::kPrefetchBackward : Kind::kPrefetchForward;
    before[compute[number[use.use] - passes::ahead_of_use(wait(use), options)]].push_back(
        {use.chunk, prefetch, use.micro_batch});
    if (use.is_message) continue;
    std::size_t at = use.there + 1;
    while (actions[at] == Action{actions[use.there].chunk, Kind::kOffload, use.micro_batch}) ++at;
    const Kind offload = use.is_gradient ? Kind::kOffloadBackward : Kind::kOffloadForward;
    before[at].push_back({use.chunk, offload, use.micro_batch});
  }
  std::vector<Action> result;
  for (std::size_t at = 0; at < actions.size(); ++at) {
    result.insert(result.end(), before[at].begin(), before[at].end());
    result.push_back(actions[at]);
  }
  return result;
}

}  // namespace

Schedule passes::lazy(const Schedule& lowered, const LoweringOptions& options) {
  if (!options.lazy || !has_backward(lowered)) return lowered;
  Schedule made{lowered.shape, {}};
  for (const auto& actions : lowered.ranks) {
    made.ranks.push_back(with_copies(lowered.shape, actions, options));
  }
  return made;
}

}  // namespace fold3d::core
