#include "core/ir/stash.h"

#include <algorithm>

#include "core/ir/action_kinds.h"

namespace fold3d::core {
namespace {

/// What each action of a list adds to device and pool.
struct Changes {
  explicit Changes(std::size_t actions) : before(actions + 1), after(actions + 1) {}
  std::vector<StashPeak> before;  // while the action runs, and from then on
  std::vector<StashPeak> after;   // when it is done
};

Changes changes_of(const Schedule& schedule, std::size_t rank, const std::vector<std::int64_t>& bytes) {
  const auto& actions = schedule.ranks[rank];
  std::vector<StashUse> uses = stash_uses(schedule.shape, actions);
  Changes changes(actions.size());
  std::vector<StashUse> leaving;
  for (const StashUse& use : uses) {
    const std::int64_t size = bytes.empty() ? 1 : bytes.at(static_cast<std::size_t>(use.chunk));
    changes.before[use.forward].device += size;
    if (use.last != StashUse::kNone) changes.after[use.last].device -= size;
    if (use.offload == StashUse::kNone) continue;
    changes.before[use.offload].pool += size;
    leaving.push_back(use);
    if (use.prefetch == StashUse::kNone) continue;
    changes.before[use.prefetch].device += size;
    if (use.first != StashUse::kNone) changes.before[use.first].pool -= size;
  }
  std::sort(leaving.begin(), leaving.end(), [](const StashUse& a, const StashUse& b) { return a.offload < b.offload; });
  for (std::size_t k = 0; k < leaving.size(); ++k) {
    const std::int64_t size = bytes.empty() ? 1 : bytes.at(static_cast<std::size_t>(leaving[k].chunk));
    const std::size_t follower = k + kOffloadsUnderWay;
    std::size_t gone = follower < leaving.size() ? leaving[follower].offload : actions.size();
    gone = std::min(gone, leaving[k].prefetch);  // a PREFETCH begins when the way out is over
    changes.before[gone].device -= size;
  }
  return changes;
}

}  // namespace

std::vector<int> peak_stash(const Schedule& schedule) {
  std::vector<int> peaks;
  for (const auto& actions : schedule.ranks) {
    int stashed = 0;
    int peak = 0;
    for (const Action& action : actions) {
      stashed += about(action.kind).stash;
      peak = std::max(peak, stashed);
    }
    peaks.push_back(peak);
  }
  return peaks;
}

std::vector<StashUse> stash_uses(const Shape& shape, const std::vector<Action>& actions) {
  std::vector<StashUse> uses;
  std::vector<std::size_t> number(static_cast<std::size_t>(shape.num_chunks() * shape.micro_batches), StashUse::kNone);
  for (std::size_t at = 0; at < actions.size(); ++at) {
    const auto [chunk, kind, i] = actions[at];
    if (chunk < 0 || chunk >= shape.num_chunks() || i < 0 || i >= shape.micro_batches) continue;
    std::size_t& mine = number[static_cast<std::size_t>(chunk * shape.micro_batches + i)];
    if (kind == Kind::kForward) {
      mine = uses.size();
      uses.push_back({.chunk = chunk, .micro_batch = i, .forward = at});
      continue;
    }
    if (mine == StashUse::kNone) continue;
    StashUse& use = uses[mine];
    if (kind == Kind::kOffload) use.offload = at;
    if (kind == Kind::kPrefetch) use.prefetch = at;
    if (!is_compute(kind)) continue;
    if (use.first == StashUse::kNone) use.first = at;
    use.last = at;
  }
  return uses;
}

std::vector<StashPeak> stash_peaks(const Schedule& schedule, const std::vector<std::int64_t>& bytes) {
  std::vector<StashPeak> peaks;
  for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    const Changes changes = changes_of(schedule, rank, bytes);
    StashPeak now, peak;
    for (std::size_t at = 0; at < changes.before.size(); ++at) {
      now.device += changes.before[at].device;
      now.pool += changes.before[at].pool;
      peak.device = std::max(peak.device, now.device);
      peak.pool = std::max(peak.pool, now.pool);
      now.device += changes.after[at].device;
      now.pool += changes.after[at].pool;
    }
    peaks.push_back(peak);
  }
  return peaks;
}

}  // namespace fold3d::core
