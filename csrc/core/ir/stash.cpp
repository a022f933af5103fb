#include "core/ir/stash.h"

#include <algorithm>
#include <utility>

#include "core/ir/action_kinds.h"

namespace fold3d::core {
namespace {

/// What each action of a list adds to device and pool. Of `instant` copies the way back is over where it begins.
struct Changes {
  explicit Changes(std::size_t actions, bool instant) : before(actions + 1), after(actions + 1), instant(instant) {}
  std::vector<StashPeak> before;  // while the action runs, and from then on
  std::vector<StashPeak> after;   // when it is done
  bool instant;
};

/// What leaves by an OFFLOAD, and where that stands.
struct Leaving {
  std::size_t offload, prefetch;
  std::int64_t size;
};

/// When what leaves has left.
void count_leaving(Changes& changes, std::vector<Leaving> leaving) {
  std::sort(leaving.begin(), leaving.end(), [](const Leaving& a, const Leaving& b) { return a.offload < b.offload; });
  for (std::size_t k = 0; k < leaving.size(); ++k) {
    const std::size_t follower = k + kOffloadsUnderWay;
    std::size_t gone = follower < leaving.size() ? leaving[follower].offload : changes.before.size() - 1;
    gone = std::min(gone, leaving[k].prefetch);  // a PREFETCH begins when the way out is over
    changes.before[gone].device -= leaving[k].size;
  }
}

void count_stashes(Changes& changes, const std::vector<StashUse>& uses, const std::vector<std::int64_t>& bytes) {
  std::vector<Leaving> leaving;
  for (const StashUse& use : uses) {
    const std::int64_t size = bytes.empty() ? 1 : bytes.at(static_cast<std::size_t>(use.chunk));
    changes.before[use.forward].device += size;
    if (use.last != StashUse::kNone) changes.after[use.last].device -= size;
    if (use.offload == StashUse::kNone) continue;
    changes.before[use.offload].pool += size;
    leaving.push_back({use.offload, use.prefetch, size});
    if (use.prefetch == StashUse::kNone) continue;
    changes.before[use.prefetch].device += size;
    const std::size_t back = changes.instant ? use.prefetch : use.first;
    if (back != StashUse::kNone) changes.before[back].pool -= size;
  }
  count_leaving(changes, std::move(leaving));
}

void count_borders(Changes& changes, const std::vector<BorderUse>& uses, const std::vector<std::int64_t>& sent) {
  std::vector<Leaving> leaving;
  for (const BorderUse& use : uses) {
    const std::int64_t size = sent.at(static_cast<std::size_t>(use.border()));
    const bool lands = use.is_message && use.prefetch != StashUse::kNone;
    (lands ? changes.before[use.there].pool : changes.before[use.there].device) += size;
    changes.after[use.use].device -= size;
    if (use.offload != StashUse::kNone) {
      changes.before[use.offload].pool += size;
      leaving.push_back({use.offload, use.prefetch, size});
    }
    if (use.prefetch == StashUse::kNone) continue;
    changes.before[use.prefetch].device += size;
    changes.before[changes.instant ? use.prefetch : use.use].pool -= size;
  }
  count_leaving(changes, std::move(leaving));
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

std::vector<BorderUse> border_uses(const Shape& shape, const std::vector<Action>& actions) {
  const int chunks = shape.num_chunks();
  std::vector<BorderUse> all(2 * static_cast<std::size_t>(chunks * shape.micro_batches));
  const auto entry = [&](bool is_gradient, int chunk, int i) -> BorderUse* {
    const int maker = is_gradient ? chunk + 1 : chunk - 1;
    if (chunk < 0 || chunk >= chunks || maker < 0 || maker >= chunks) return nullptr;
    BorderUse& use = all[static_cast<std::size_t>(((is_gradient ? chunks : 0) + chunk) * shape.micro_batches + i)];
    use.chunk = chunk;
    use.micro_batch = i;
    use.is_gradient = is_gradient;
    use.is_message = shape.stage_of(maker) != shape.stage_of(chunk);
    return &use;
  };
  const auto put = [&](BorderUse* use, std::size_t BorderUse::* where, std::size_t at) {
    if (use != nullptr) use->*where = at;
  };
  const auto made = [&](BorderUse* use, bool by_message, std::size_t at) {
    if (use != nullptr && use->is_message == by_message) use->there = at;
  };
  for (std::size_t at = 0; at < actions.size(); ++at) {
    const auto [chunk, kind, i] = actions[at];
    if (chunk < 0 || chunk >= chunks || i < 0 || i >= shape.micro_batches) continue;
    switch (kind) {
      case Kind::kForward:
        put(entry(false, chunk, i), &BorderUse::use, at);
        made(entry(false, chunk + 1, i), false, at);
        break;
      case Kind::kBackward:
      case Kind::kBackwardInput:
        put(entry(true, chunk, i), &BorderUse::use, at);
        made(entry(true, chunk - 1, i), false, at);
        break;
      case Kind::kRecvForward:
      case Kind::kRecvBackward:
        made(entry(kind == Kind::kRecvBackward, chunk, i), true, at);
        break;
      case Kind::kOffloadForward:
      case Kind::kOffloadBackward:
        put(entry(kind == Kind::kOffloadBackward, chunk, i), &BorderUse::offload, at);
        break;
      case Kind::kPrefetchForward:
      case Kind::kPrefetchBackward:
        put(entry(kind == Kind::kPrefetchBackward, chunk, i), &BorderUse::prefetch, at);
        break;
      default:
        break;
    }
  }
  std::erase_if(all, [](const BorderUse& use) { return use.there == StashUse::kNone || use.use == StashUse::kNone; });
  return all;
}

namespace {

StashPeak peak_of(const Shape& shape, const std::vector<Action>& actions, const std::vector<std::int64_t>& bytes,
                  const std::vector<std::int64_t>& sent, bool instant) {
  Changes changes(actions.size(), instant);
  count_stashes(changes, stash_uses(shape, actions), bytes);
  if (!sent.empty()) count_borders(changes, border_uses(shape, actions), sent);
  StashPeak now, peak;
  for (std::size_t at = 0; at < changes.before.size(); ++at) {
    now.device += changes.before[at].device;
    now.pool += changes.before[at].pool;
    peak.device = std::max(peak.device, now.device);
    peak.pool = std::max(peak.pool, now.pool);
    now.device += changes.after[at].device;
    now.pool += changes.after[at].pool;
  }
  return peak;
}

}  // namespace

StashPeak stash_peak(const Shape& shape, const std::vector<Action>& actions, const std::vector<std::int64_t>& bytes,
                     const std::vector<std::int64_t>& sent) {
  return peak_of(shape, actions, bytes, sent, false);
}

std::vector<std::int64_t> least_pools(const Schedule& schedule, const std::vector<std::int64_t>& bytes,
                                      const std::vector<std::int64_t>& sent) {
  std::vector<std::int64_t> pools;
  for (const auto& actions : schedule.ranks) {
    pools.push_back(peak_of(schedule.shape, actions, bytes, sent, true).pool);
  }
  return pools;
}

std::vector<StashPeak> stash_peaks(const Schedule& schedule, const std::vector<std::int64_t>& bytes,
                                   const std::vector<std::int64_t>& sent) {
  std::vector<StashPeak> peaks;
  for (const auto& actions : schedule.ranks) peaks.push_back(stash_peak(schedule.shape, actions, bytes, sent));
  return peaks;
}

}  // namespace fold3d::core
