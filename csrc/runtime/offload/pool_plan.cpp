#include "runtime/offload/pool_plan.h"

#include <algorithm>

#include "core/ir/stash.h"
#include "memory/slot/tier.h"

namespace fold3d::runtime {

using core::Kind;

PoolPlan::What PoolPlan::what_of(Kind kind) {
  switch (kind) {
    case Kind::kOffloadForward:
    case Kind::kRecvForward:
      return kInput;
    case Kind::kOffloadBackward:
    case Kind::kRecvBackward:
      return kGradient;
    default:
      return kStash;
  }
}

void PoolPlan::begin(const core::Shape& shape, const std::vector<core::Action>& program) {
  const std::lock_guard lock(mutex_);
  shape_ = shape;
  program_ = program;
  for (ByChunk& each : kept_) {
    each.resize(static_cast<std::size_t>(shape.num_chunks()));
    for (Kept& kept : each) kept.at_once = 0;
  }
  std::array<std::vector<std::int64_t>, 3> now;
  for (auto& each : now) each.resize(kept_[kStash].size(), 0);
  const auto enters = [&](What what, int chunk) {
    const auto c = static_cast<std::size_t>(chunk);
    kept_[what][c].at_once = std::max(kept_[what][c].at_once, ++now[what][c]);
  };
  const auto goes = [&](What what, int chunk) { --now[what][static_cast<std::size_t>(chunk)]; };
  // Which of them enters or goes at each action: a slot is free for the next when what lay in it has been used.
  std::vector<std::vector<std::pair<What, int>>> in(program.size()), out(program.size());
  for (const core::StashUse& use : core::stash_uses(shape, program)) {
    if (use.offload == core::StashUse::kNone || use.first == core::StashUse::kNone) continue;
    in[use.offload].emplace_back(kStash, use.chunk);
    out[use.first].emplace_back(kStash, use.chunk);
  }
  for (const core::BorderUse& use : core::border_uses(shape, program)) {
    if (use.prefetch == core::StashUse::kNone) continue;
    const What what = use.is_gradient ? kGradient : kInput;
    in[use.is_message ? use.there : use.offload].emplace_back(what, use.chunk);
    out[use.use].emplace_back(what, use.chunk);
  }
  for (std::size_t at = 0; at < program.size(); ++at) {
    for (const auto& [what, chunk] : out[at]) goes(what, chunk);
    for (const auto& [what, chunk] : in[at]) enters(what, chunk);
  }
}

std::optional<std::int64_t> PoolPlan::peak() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::int64_t> stashes(kept_[kStash].size(), 0), sent(stashes.size(), 0);
  for (std::size_t chunk = 0; chunk < stashes.size(); ++chunk) {
    for (const What what : {kStash, kInput, kGradient}) {
      const Kept& kept = kept_[what][chunk];
      if (kept.at_once == 0) continue;
      if (kept.largest == kUnknown) return std::nullopt;
      std::int64_t& most = what == kStash ? stashes[chunk] : sent[what == kInput ? chunk - 1 : chunk];
      most = std::max(most, kept.largest);
    }
  }
  return core::stash_peak(shape_, program_, stashes, sent).pool;
}

void PoolPlan::make_room(memory::HostPool& pool, const core::Action& action, std::size_t bytes) {
  const std::size_t page = memory::Tier::kAlignment;
  const auto size = static_cast<std::int64_t>((bytes + page - 1) / page * page);
  std::int64_t at_once = 0;
  {
    const std::lock_guard lock(mutex_);
    Kept& kept = kept_[what_of(action.kind)].at(static_cast<std::size_t>(action.chunk));
    if (size <= kept.largest) return;
    // Those in the pool already have their slots; the step's others are about as large as this one.
    kept.largest = size;
    at_once = std::max<std::int64_t>(1, kept.at_once);
  }
  pool.reserve(static_cast<std::size_t>(size * at_once));
}

}  // namespace fold3d::runtime
