#include "core/plan/group.h"

#include <algorithm>
#include <functional>
#include <set>
#include <stdexcept>
#include <tuple>

#include "core/generators/registry.h"

namespace fold3d::core {
namespace {

constexpr int kMostSegments = 32;
/// Cuts: those of the first look, then all.
const std::vector<Shares> kShares = {
    {},
    {.first = 0.25},
    {.last = 0.5},
    {.first = 0.5, .last = 1.3, .grow = true},
    {.first = 0.5},
    {.first = 1.5},
    {.first = 0.5, .last = 0.5},
    {.first = 0.3, .last = 1.2, .grow = true},
};
constexpr std::size_t kFirstShares = 4;
constexpr int kGathers = 24;             // numbers of early gathers looked at
constexpr double kNearFastest = 1.03;    // within which the numbers of early gathers may make a layout the fastest
constexpr double kWorthSparing = 1.002;  // what is better by less is not looked for where it takes memory
constexpr double kWorthCopies = 1.01;    // of the time without them
constexpr int kTriesToFit = 3;           // of what fits without DP.sync

std::size_t at(int number) { return static_cast<std::size_t>(number); }

std::vector<int> numbers_of(const Spared& spared) {
  std::vector<int> numbers = {static_cast<int>(spared.leaves), spared.percent};
  for (const Choice& choice : spared.again) {
    numbers.insert(numbers.end(), {choice.full, choice.every, choice.inside});
  }
  return numbers;
}

std::int64_t scaled(std::int64_t ns, double factor) {
  return static_cast<std::int64_t>(static_cast<double>(ns) * factor);
}

std::vector<int> group_sizes(const PlanJob& job, bool of_fold, bool is_asked_for) {
  const int m = job.micro_batches;
  std::vector<int> sizes;
  if (of_fold) {
    const int stride = m <= 8 * job.pp ? 2 : 4;
    for (std::int64_t size = job.pp; size < m; size *= stride) sizes.push_back(static_cast<int>(size));
    sizes.push_back(m);
    // fold with N = pp is the interleaved schedule.
    if (!is_asked_for) sizes.erase(std::remove(sizes.begin(), sizes.end(), job.pp), sizes.end());
  } else {
    for (std::int64_t size = 2; size < m; size *= 2) {
      sizes.push_back(static_cast<int>(size));
      if (size * 3 / 2 < m) sizes.push_back(static_cast<int>(size * 3 / 2));
    }
    // kfkb with k = 1 is 1f1b, with k = m it is gpipe.
    if (is_asked_for) sizes.insert(sizes.end(), {1, m});
  }
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  return sizes;
}

bool has_split(const Schedule& schedule) {
  for (const auto& actions : schedule.ranks) {
    for (const Action& action : actions) {
      if (action.kind == Kind::kBackwardWeight) return true;
    }
  }
  return false;
}

/// Whether a registered schedule has split backwards.
bool splits_backward(const std::string& name) {
  static const std::set<std::string> found = [] {
    std::set<std::string> names;
    for (const SchedulerInfo& info : registry()) {
      try {
        const int segments = info.segments != 0 ? info.segments : info.uses_segments ? 2 : 1;
        if (has_split(generate(info.name, {{2, segments, 2}, 0, ""}))) names.insert(info.name);
      } catch (const std::invalid_argument&) {
        continue;  // it wants another shape, and is looked at when it has one
      }
    }
    return names;
  }();
  return found.count(name) > 0;
}

bool is_only(const std::vector<Way>& ways, Way way) {
  return std::all_of(ways.begin(), ways.end(), [way](Way one) { return one == way; });
}

}  // namespace

std::vector<int> segments_to_try(const PlanJob& job, const PlanSpace& space) {
  if (space.segments) return {*space.segments};
  if (space.ranges) return {static_cast<int>(space.ranges->size()) / job.pp};
  const auto& again = space.sparing.fixed.again;
  if (again.size() > 1) return {std::max(1, static_cast<int>(again.size()) / job.pp)};  // said chunk by chunk
  int most = std::max(1, std::min(kMostSegments, static_cast<int>(job.starts.size()) / job.pp));
  if (!space.given && !space.schedule.empty()) {
    for (const SchedulerInfo& info : registry()) {
      if (info.name != space.schedule) continue;
      if (info.segments != 0) return {info.segments};
      if (!info.uses_segments) most = 1;
    }
  }
  std::vector<int> found;
  for (int n = 1; n <= most; ++n) {
    if (n <= 12 || n % 4 == 0 || n == most) found.push_back(n);
  }
  return found;
}

std::vector<Order> orders_to_try(const PlanJob& job, const PlanSpace& space, int segments) {
  if (space.given) return {{space.schedule, 0, space.given}};
  const std::string asked = space.schedule.empty() && space.group_size > 0 ? "fold" : space.schedule;
  std::vector<Order> found;
  for (const SchedulerInfo& info : registry()) {
    if (!asked.empty() && info.name != asked) continue;
    if (asked.empty() && splits_backward(info.name) && (!job.may_split || space.sparing.fixed.rebuilds_blocks()))
      continue;
    // With one segment these are the others'.
    if (asked.empty() && (!info.allows(segments) || info.uses_segments != (segments > 1))) continue;
    // On one stage orders that differ from 1F1B in when stages wait for each other only keep more.
    const bool is_for_stages = info.name == "kfkb" || info.name == "shifted_critical_path";
    if (asked.empty() && job.pp == 1 && is_for_stages) continue;
    if (asked.empty() && info.style != job.style) continue;  // the chunks would lie on other stages
    if (!info.uses_group_size || space.group_size > 0) {
      found.push_back({info.name, space.group_size, nullptr});
      continue;
    }
    for (const int size : group_sizes(job, info.uses_segments, !asked.empty())) {
      found.push_back({info.name, size, nullptr});
    }
  }
  if (found.empty()) found.push_back({asked, space.group_size, nullptr});  // `generate` says what is wrong with it
  const std::string plainest = segments > 1 ? "aiao" : "1f1b";
  std::stable_partition(found.begin(), found.end(), [&](const Order& order) { return order.name == plainest; });
  return found;
}

std::vector<int> early_gathers_to_try(int buckets, int count) {
  std::vector<int> found = {-1};
  const int stride = std::max(1, (buckets + count - 1) / count);
  for (int number = 0; number < buckets; number += stride) found.push_back(number);
  return found;
}

Cuts cuts_of(const PlanJob& job, const PlanSpace& space, int segments) {
  Cuts cuts;
  if (space.ranges) {
    cuts.ranges = {*space.ranges};
  } else {
    for (const Shares& shares : kShares) {
      Ranges ranges = cut(job, segments, shares);
      const bool is_new = std::find(cuts.ranges.begin(), cuts.ranges.end(), ranges) == cuts.ranges.end();
      if (is_new) cuts.ranges.push_back(std::move(ranges));
      if (&shares < &kShares[kFirstShares]) cuts.usual = cuts.ranges.size();
    }
  }
  cuts.usual = std::max<std::size_t>(1, cuts.usual);
  cuts.least_ns = cuts.least_split_ns = cuts.least_bytes = kNever;
  const bool shares = job.dp > 1 && (space.modes || space.mixes || !is_only(space.ways, Way::kEarly));
  for (const Ranges& ranges : cuts.ranges) {
    const Layout layout = layout_of(job, ranges, space.bucket_bytes.front(), space.sparing.fixed);
    const std::int64_t whole = least_step_ns(job, layout, false);
    if (cuts.likely_ns == 0) cuts.likely_ns = whole;
    cuts.least_ns = std::min(cuts.least_ns, whole);
    cuts.least_split_ns = std::min(cuts.least_split_ns, least_step_ns(job, layout, true));
    cuts.least_bytes = std::min(cuts.least_bytes, least_bytes(job, layout, shares));
  }
  return cuts;
}

Group::Group(const PlanJob& job, const PlanSpace& space, int segments, Order order, std::shared_ptr<const Cuts> cuts)
    : job_(job), space_(space), segments_(segments), order_(std::move(order)), cuts_(std::move(cuts)) {
  splits_ = order_.given ? has_split(*order_.given) : splits_backward(order_.name);
}

Programs& Group::programs() {
  if (!programs_) {
    programs_ = std::make_unique<Programs>(job_, order_, segments_);
    splits_ = has_split(programs_->compute_only());
  }
  return *programs_;
}

bool Group::has_room(const StagePeak& peak) const {
  return (!job_.memory_limit || peak.bytes <= *job_.memory_limit) &&
         (!job_.pool_limit || peak.pool <= *job_.pool_limit);
}

bool Group::fits(const Candidate& candidate) const {
  return std::all_of(candidate.peaks.begin(), candidate.peaks.end(),
                     [this](const StagePeak& peak) { return has_room(peak); });
}

const Candidate* Group::fastest() const {
  const auto key = [](const Candidate& one) {
    const Spared& spared = one.layout->spared;
    return std::tuple(one.step_ns, spared.ways(), spared.percent);
  };
  const Candidate* best = nullptr;
  for (const auto& one : candidates_) {
    if (fits(*one) && (best == nullptr || key(*one) < key(*best))) best = one.get();
  }
  return best;
}

std::int64_t Group::shortest_ns() const {
  std::int64_t found = kNever;
  for (const auto& one : candidates_) found = std::min(found, one->step_ns);
  return found;
}

const Candidate& Group::tried(const std::shared_ptr<const Layout>& layout, const Modes& modes, int early_gathers) {
  Key key{layout->ranges, layout->bucket_bytes, numbers_of(layout->spared), modes, early_gathers};
  const auto [entry, is_new] = known_.emplace(std::move(key), candidates_.size());
  if (is_new) {
    candidates_.push_back(
        std::make_unique<Candidate>(programs().tried(job_, layout, modes, early_gathers, has_limit())));
  }
  return *candidates_[entry->second];
}

/// What is worth looking for: faster than the fastest here, too.
std::int64_t Group::cutoff_of(std::int64_t cutoff_ns) const {
  const Candidate* best = fastest();
  return best == nullptr ? cutoff_ns : std::min(cutoff_ns, scaled(best->step_ns, 1 / kWorthLooking));
}

void Group::try_ways(const std::shared_ptr<const Layout>& layout, std::int64_t cutoff_ns, bool all) {
  if (least_step_ns(job_, *layout, splits_) >= cutoff_of(cutoff_ns)) return;
  if (space_.modes) {
    tried(layout, *space_.modes, -1);
    return;
  }
  for (const Way way : space_.ways) {
    tried(layout, uniform_modes(job_, *layout, way), -1);
    if (job_.dp == 1 || !all) break;  // nothing is summed
  }
}

void Group::try_gathers(const std::shared_ptr<const Layout>& layout) {
  int buckets = 0;
  for (int stage = 0; stage < job_.pp; ++stage) buckets = std::max(buckets, layout->buckets_of(stage, job_.pp));
  const bool early = std::find(space_.ways.begin(), space_.ways.end(), Way::kEarly) != space_.ways.end();
  if (job_.dp == 1 || job_.gradient_delay > 0 || (!space_.modes && !early)) return;  // none begins before a step's end
  const Modes modes = space_.modes ? *space_.modes : uniform_modes(job_, *layout, Way::kEarly);
  for (const int limit : early_gathers_to_try(buckets, kGathers)) {
    const Candidate& found = tried(layout, modes, limit);
    if (!space_.mixes || limit <= 0 || space_.modes) continue;
    // "early" for the first gathers of each stage, "zero1" for all others.
    Modes mixed = uniform_modes(job_, *layout, Way::kZero1);
    for (int stage = 0; stage < job_.pp; ++stage) {
      const std::vector<int>& order = found.gather_order.at(at(stage));
      for (std::size_t k = 0; k < order.size() && k < at(limit); ++k) mixed[at(stage)][at(order[k])] = Way::kEarly;
    }
    tried(layout, mixed, limit);
  }
}

void Group::look(std::int64_t cutoff_ns) {
  try {
    programs();
  } catch (const std::invalid_argument& error) {
    refused_ = error.what();
    return;
  }
  try_ways(usual_layout(cuts_->ranges.front()), cutoff_ns, false);
}

void Group::look_again(std::int64_t cutoff_ns) {
  for (std::size_t k = 0; k < cuts_->usual; ++k) try_ways(usual_layout(cuts_->ranges[k]), cutoff_ns);
}

/// With small buckets, but not the smallest if there is a choice.
std::shared_ptr<const Layout> Group::usual_layout(const Ranges& ranges) const {
  std::vector<Layout> layouts = layouts_of(job_, ranges, space_.bucket_bytes, space_.sparing.fixed);
  return std::make_shared<Layout>(std::move(layouts[std::min<std::size_t>(1, layouts.size() - 1)]));
}

void Group::look_closely(std::int64_t cutoff_ns, const Spared& like, std::size_t most) {
  const std::size_t until = candidates_.size() + most;
  std::vector<std::shared_ptr<const Layout>> layouts;
  for (const Ranges& ranges : cuts_->ranges) {
    std::vector<Layout> made = layouts_of(job_, ranges, space_.bucket_bytes, like);
    if (least_step_ns(job_, made.front(), splits_) >= cutoff_of(cutoff_ns)) continue;
    if (programs().without_dp_sync(job_, made.front()) >= cutoff_of(cutoff_ns)) continue;
    if (job_.dp == 1) made.resize(std::min<std::size_t>(2, made.size()));  // nothing is summed
    for (Layout& layout : made) {
      if (candidates_.size() >= until) break;
      layouts.push_back(std::make_shared<Layout>(std::move(layout)));
      try_ways(layouts.back(), cutoff_ns);
    }
  }
  const Candidate* best = fastest();
  const std::int64_t near = scaled(best == nullptr ? cutoff_ns : std::min(best->step_ns, cutoff_ns), kNearFastest);
  std::vector<std::pair<std::int64_t, std::shared_ptr<const Layout>>> close;
  for (const auto& layout : layouts) {
    const Modes modes = space_.modes ? *space_.modes : uniform_modes(job_, *layout, space_.ways.front());
    const auto known = known_.find(Key{layout->ranges, layout->bucket_bytes, numbers_of(like), modes, -1});
    if (known == known_.end() || candidates_[known->second]->step_ns > near) continue;
    close.emplace_back(candidates_[known->second]->step_ns, layout);
  }
  std::stable_sort(close.begin(), close.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  const std::size_t end = candidates_.size() + most;
  for (const auto& [step_ns, layout] : close) {
    if (candidates_.size() >= end) break;
    if (least_step_ns(job_, *layout, splits_) < cutoff_of(cutoff_ns)) try_gathers(layout);
  }
}

std::shared_ptr<const Layout> Group::spared_like(const Candidate& candidate, const Spared& spared) {
  return std::make_shared<Layout>(layout_of(job_, candidate.layout->ranges, candidate.layout->bucket_bytes, spared));
}

std::vector<const Candidate*> Group::fastest_of_ways() const {
  std::map<SyncKind, const Candidate*> best;
  for (const auto& one : candidates_) {
    if (one->layout->spared != space_.sparing.fixed) continue;
    const Candidate*& mine = best[kind_of(one->modes)];
    if (mine == nullptr || one->step_ns < mine->step_ns) mine = one.get();
  }
  std::vector<const Candidate*> found;
  for (const auto& [kind, one] : best) found.push_back(one);
  return found;
}

std::vector<Ladder> Group::ladders_of(const Candidate& like) const {
  std::vector<Ladder> found = ladders(job_, space_.sparing, like.layout->chunks());
  if (!splits_) return found;
  std::vector<Ladder> whole;
  for (Ladder& ladder : found) {
    if (ladder.steps.empty() || ladder.steps.front().full) whole.push_back(std::move(ladder));
  }
  return whole;
}

void Group::spare_most(std::int64_t cutoff_ns) {
  for (const Candidate* like : fastest_of_ways()) {
    if (fits(*like) || scaled(like->step_ns, kWorthLooking) >= cutoff_ns) continue;
    const std::vector<Ladder> all = ladders_of(*like);
    if (all.empty()) continue;
    // Block by block is the last ladder without copies.
    const Ladder* most = &all.front();
    for (const Ladder& ladder : all) {
      if (ladder.spared == space_.sparing.fixed) most = &ladder;
    }
    tried(spared_like(*like, most->highest()), like->modes, like->early_gathers);
  }
}

void Group::spare(std::int64_t cutoff_ns, std::size_t most) {
  const std::int64_t until = looks_ + static_cast<std::int64_t>(most) * kLooksOfAPlan;
  for (const Candidate* like : fastest_of_ways()) {
    if (!fits(*like)) spare_like(*like, cutoff_ns, until);
  }
}

/// Looks at steps without DP.sync, which tell how much is to be spared, and what is fast; only that is simulated whole.
void Group::spare_like(const Candidate& like, std::int64_t cutoff_ns, std::int64_t until) {
  const auto cannot = [&](std::int64_t least_ns, double worth) {
    return scaled(least_ns, worth) >= cutoff_of(cutoff_ns);
  };
  std::map<std::vector<int>, Programs::Look> looks;
  const auto look_at = [&](const Spared& spared) -> const Programs::Look& {
    const auto [entry, is_new] = looks.try_emplace(numbers_of(spared));
    if (is_new) {
      entry->second = programs().look(job_, *spared_like(like, spared), like.modes);
      ++looks_;
    }
    return entry->second;
  };
  std::vector<StagePeak> more(at(job_.pp));  // that stages need with DP.sync
  Judge judge;
  judge.look = [&](const Spared& spared) {
    Programs::Look found = look_at(spared);
    for (std::size_t stage = 0; stage < more.size(); ++stage) {
      found.peaks[stage].bytes += more[stage].bytes;
      found.peaks[stage].pool += more[stage].pool;
    }
    return found;
  };
  judge.fits = [this](const StagePeak& peak) { return has_room(peak); };
  judge.hopeless = [&](const Spared& spared) {
    return looks_ >= until || cannot(least_step_ns(job_, *spared_like(like, spared), splits_), kWorthSparing);
  };
  judge.least_ns = look_at(space_.sparing.fixed).step_ns;

  struct Found {
    std::function<std::optional<Spared>()> search;
    Spared spared;
    std::int64_t step_ns;
  };
  std::vector<Found> found;
  const std::vector<Ladder> all = ladders_of(like);
  const auto search = [&](std::function<std::optional<Spared>()> one) {
    if (const std::optional<Spared> spared = one()) {
      found.push_back({std::move(one), *spared, look_at(*spared).step_ns});
    }
  };
  for (const Ladder& ladder : all) {
    // They only add time: what takes about as long without copies is good enough.
    const bool copies = ladder.spared.leaves != Spared::Leaves::kNothing;
    if (cannot(like.step_ns, copies ? kWorthCopies : kWorthSparing)) break;
    search([&] { return climb(ladder, judge); });
    if (ladder.steps.empty() && space_.sparing.leaving_is_free) {
      search([&] { return lighten(job_, ladder.spared, judge); });
    }
    if (!copies && segments_ > 1 && !ladder.steps.empty()) search([&] { return thin(ladder, judge); });
  }
  if (found.empty() && fastest() == nullptr) {  // what needs least is told where nothing fits
    const auto needs = [&](const Ladder& ladder) { return most_bytes(look_at(ladder.highest()).peaks); };
    const auto least =
        std::min_element(all.begin(), all.end(), [&](const Ladder& a, const Ladder& b) { return needs(a) < needs(b); });
    if (least != all.end()) tried(spared_like(like, least->highest()), like.modes, like.early_gathers);
  }
  std::stable_sort(found.begin(), found.end(), [](const Found& a, const Found& b) { return a.step_ns < b.step_ns; });
  for (const Found& one : found) {
    if (job_.flush && cannot(one.step_ns, kWorthSparing)) break;
    std::optional<Spared> spared = one.spared;
    for (int tries = 0; spared && tries < kTriesToFit; ++tries) {
      const Candidate& made = tried(spared_like(like, *spared), like.modes, like.early_gathers);
      if (fits(made)) break;
      const std::vector<StagePeak>& without = look_at(*spared).peaks;
      for (std::size_t stage = 0; stage < more.size(); ++stage) {
        more[stage].bytes = std::max(more[stage].bytes, made.peaks[stage].bytes - without[stage].bytes);
        more[stage].pool = std::max(more[stage].pool, made.peaks[stage].pool - without[stage].pool);
      }
      spared = one.search();
    }
  }
}

}  // namespace fold3d::core
