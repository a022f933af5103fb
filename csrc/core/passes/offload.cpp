// OFFLOAD right after the forward that stashes, and after what sends its result; PREFETCH some compute actions ahead of
// the first use: in the order of the uses, so in the schedule's reverse order where that is how backwards come.
//
// A stash that is used again soon stays (kSoon).
#include <algorithm>
#include <cmath>

#include "core/ir/action_kinds.h"
#include "core/ir/deps.h"
#include "core/ir/stash.h"
#include "core/passes/pass.h"

namespace fold3d::core {
namespace {

/// Whether the stash of a micro-batch is one of the share that leaves: of the first n about n * share are.
bool is_of_share(int micro_batch, double share) {
  constexpr double kRounding = 1e-9;
  return std::floor((micro_batch + 1) * share + kRounding) > std::floor(micro_batch * share + kRounding);
}

std::vector<Action> with_copies(const Shape& shape, const std::vector<Action>& actions,
                                const LoweringOptions& options) {
  std::vector<std::size_t> compute;  // positions
  std::vector<std::size_t> number(actions.size());
  for (std::size_t at = 0; at < actions.size(); ++at) {
    number[at] = compute.size();
    if (is_compute(actions[at].kind)) compute.push_back(at);
  }
  std::vector<std::vector<Action>> before(actions.size() + 1);
  std::vector<StashUse> uses = stash_uses(shape, actions);
  const auto wait = [&](const StashUse& use) { return number[use.first] - number[use.forward] - 1; };
  std::erase_if(uses, [&](const StashUse& use) {
    if (!options.offload[static_cast<std::size_t>(use.chunk)] || use.first == StashUse::kNone) return true;
    if (!is_of_share(use.micro_batch, options.offload_share)) return true;
    return wait(use) < passes::kSoon;
  });
  for (const StashUse& use : uses) {
    std::size_t at = use.forward + 1;
    const auto send = send_after(shape, actions[use.forward]);
    if (send && at < actions.size() && actions[at] == *send) ++at;
    before[at].push_back({use.chunk, Kind::kOffload, use.micro_batch});
  }
  std::sort(uses.begin(), uses.end(), [](const StashUse& a, const StashUse& b) { return a.first < b.first; });
  for (const StashUse& use : uses) {
    const std::size_t ahead = passes::ahead_of_use(wait(use), options);
    before[compute[number[use.first] - ahead]].push_back({use.chunk, Kind::kPrefetch, use.micro_batch});
  }
  std::vector<Action> result;
  for (std::size_t at = 0; at <= actions.size(); ++at) {
    result.insert(result.end(), before[at].begin(), before[at].end());
    if (at < actions.size()) result.push_back(actions[at]);
  }
  return result;
}

}  // namespace

Schedule passes::offload(const Schedule& lowered, const LoweringOptions& options) {
  if (std::find(options.offload.begin(), options.offload.end(), true) == options.offload.end()) return lowered;
  Schedule offloaded{lowered.shape, {}};
  for (const auto& actions : lowered.ranks) {
    offloaded.ranks.push_back(with_copies(lowered.shape, actions, options));
  }
  return offloaded;
}

}  // namespace fold3d::core
