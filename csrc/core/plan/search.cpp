#include "core/plan/search.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <tuple>

namespace fold3d::core {
namespace {

constexpr std::size_t kRound = 8;        // groups looked at before the best is asked for again
constexpr std::size_t kCloseRound = 4;   // likewise, closely
constexpr double kEqual = 1.001;         // steps within this factor are equal
constexpr double kPromising = 1.08;      // of the fastest: worth a closer look
constexpr double kNear = 1.25;           // ... worth a second look
constexpr std::size_t kMostClose = 48;   // groups that get a closer look
constexpr std::size_t kMostSpared = 32;  // groups that are made to fit as well as can be
constexpr std::size_t kMostMeshes = 4;   // where memory is short: so many jobs have each what one has alone

/// How much a phase of the search may simulate: so many actions, and where plans are large, so many plans.
struct Work {
  std::int64_t actions = 0;
  std::int64_t plans = 0;
};
constexpr Work kLook = {1'500'000, 100};
constexpr Work kLookAgain = {1'000'000, 60};
constexpr Work kSpare = {1'500'000, 100};
constexpr Work kLookClosely = {3'000'000, 150};
constexpr Work kOfGroup = {300'000, 40};  // of these a group

std::int64_t scaled(std::int64_t ns, double factor) {
  return ns == kNever ? kNever : static_cast<std::int64_t>(static_cast<double>(ns) * factor);
}

struct Entry {
  std::size_t job;
  std::unique_ptr<Group> group;
};

class Search {
 public:
  Search(const std::vector<PlanJob>& jobs, const PlanSpace& space, const SearchOptions& options)
      : jobs_(jobs), space_(space), options_(options), best_ns_(options.beat_ns), refused_(jobs.size()) {
    for (const PlanJob& job : jobs) job.check();
  }

  std::vector<PlanFound> run() {
    make_groups();
    look();
    spare();
    look_closely();
    std::vector<PlanFound> found;
    for (std::size_t job = 0; job < jobs_.size(); ++job) found.push_back(of_job(job));
    return found;
  }

 private:
  void make_groups() {
    struct Wanted {
      std::size_t job;
      int segments;
      Order order;
    };
    std::vector<Wanted> wanted;
    for (std::size_t job = 0; job < jobs_.size(); ++job) {
      for (const int segments : segments_to_try(jobs_[job], space_)) {
        for (Order& order : orders_to_try(jobs_[job], space_, segments)) wanted.push_back({job, segments, order});
      }
    }
    std::map<std::pair<std::size_t, int>, std::shared_ptr<const Cuts>> cuts;
    std::map<std::pair<std::size_t, int>, std::string> errors;
    for (const Wanted& one : wanted) cuts[{one.job, one.segments}];
    std::vector<std::pair<std::pair<std::size_t, int>, std::shared_ptr<const Cuts>*>> open;
    for (auto& [key, made] : cuts) {
      errors[key];
      open.emplace_back(key, &made);
    }
    options_.each(open.size(), [&](std::size_t k) {
      const auto& [key, made] = open[k];
      try {
        *made = std::make_shared<Cuts>(cuts_of(jobs_[key.first], space_, key.second));
      } catch (const std::invalid_argument& error) {
        errors.at(key) = error.what();
      }
    });
    for (Wanted& one : wanted) {
      const std::pair key{one.job, one.segments};
      if (!cuts.at(key)) {
        refuse(one.job, errors.at(key));
        continue;
      }
      auto group = std::make_unique<Group>(jobs_[one.job], space_, one.segments, std::move(one.order), cuts.at(key));
      entries_.push_back({one.job, std::move(group)});
    }
    std::stable_sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) {
      return a.group->cuts().likely_ns < b.group->cuts().likely_ns;
    });
    state_.of = static_cast<std::int64_t>(entries_.size());
  }

  void refuse(std::size_t job, const std::string& why) {
    if (refused_[job].empty()) refused_[job] = why;
  }

  /// Runs `body` on the groups, so many at a time; of the best it knows what was known before the round.
  template <class Body>
  void in_rounds(const std::string& doing, const std::vector<Entry*>& chosen, std::size_t round, const Work& most,
                 Body body) {
    state_.doing = doing;
    const Work before = done();
    for (std::size_t first = 0; first < chosen.size(); first += round) {
      const Work now = done();
      if (now.actions - before.actions > most.actions && now.plans - before.plans > most.plans) break;
      const std::size_t count = std::min(round, chosen.size() - first);
      const std::int64_t cutoff_ns = scaled(best_ns_, 1 / kWorthLooking);
      options_.each(count, [&](std::size_t k) { body(*chosen[first + k], cutoff_ns); });
      for (std::size_t k = 0; k < count; ++k) note(*chosen[first + k]);
      if (options_.progress) options_.progress(state_);
    }
  }

  Work done() const {
    Work work;
    for (const Entry& one : entries_) {
      const std::int64_t plans = one.group->plans();
      work.actions += plans * one.group->actions_of_a_plan();
      work.plans += plans;
    }
    return work;
  }

  void note(const Entry& entry) {
    if (!entry.group->refused().empty()) refuse(entry.job, entry.group->refused());
    const Candidate* fastest = entry.group->fastest();
    state_.simulated = done().plans;
    if (fastest == nullptr) return;
    best_ns_ = std::min(best_ns_, fastest->step_ns);
    if (state_.job >= 0 && fastest->step_ns >= state_.best_ns) return;
    state_.job = static_cast<int>(entry.job);
    state_.best_ns = fastest->step_ns;
    state_.best = row(entry, *fastest);
  }

  RunnerUp row(const Entry& entry, const Candidate& candidate) const {
    const Order& order = entry.group->order();
    return {entry.group->segments(),      order.name,       order.group_size, kind_of(candidate.modes),
            entry.group->fits(candidate), candidate.step_ns};
  }

  void look() {
    std::vector<Entry*> possible, others;
    for (Entry& entry : entries_) (entry.group->may_fit() ? possible : others).push_back(&entry);
    const auto one_look = [](Entry& entry, std::int64_t cutoff_ns) {
      if (entry.group->least_ns() >= cutoff_ns) return;
      entry.group->look(cutoff_ns);
      // What can be reached at all bounds what else is looked at.
      const bool fits = entry.group->fastest() != nullptr;
      if (!fits && entry.group->job().memory_limit) entry.group->spare_most(cutoff_ns);
    };
    // Of jobs of which the plainest plan, with all blocks computed again, does not fit, hardly another one does.
    std::vector<Entry*> plainest;
    std::vector<bool> has_one(jobs_.size(), false), fits_job(jobs_.size(), false);
    for (Entry* entry : possible) {
      if (!entry->group->job().memory_limit || entry->group->splits() || has_one[entry->job]) continue;
      if (entry->group->order().name != "1f1b" && !space_.segments && space_.schedule.empty()) continue;
      has_one[entry->job] = true;
      plainest.push_back(entry);
    }
    in_rounds("looking for what fits", plainest, kRound, kLook, [](Entry& entry, std::int64_t) {
      entry.group->look(kNever);
      if (entry.group->fastest() == nullptr) entry.group->spare_most(kNever);
    });
    for (const Entry* entry : plainest) fits_job[entry->job] = entry->group->fastest() != nullptr;
    std::stable_partition(possible.begin(), possible.end(),
                          [&](const Entry* entry) { return !has_one[entry->job] || fits_job[entry->job]; });
    in_rounds("looking", possible, kRound, kLook, one_look);
    // What needs least is told where nothing fits.
    if (best_ns_ != kNever) others.clear();
    std::stable_sort(others.begin(), others.end(), [](const Entry* a, const Entry* b) {
      return a->group->cuts().least_bytes < b->group->cuts().least_bytes;
    });
    in_rounds("looking", others, kRound, kLook, one_look);
    state_.looked_at = state_.of;
    const auto near = [&](const Entry& entry) {
      const std::int64_t mine = entry.group->shortest_ns();
      return mine < scaled(best_ns_, kNear) ? mine : kNever;
    };
    in_rounds("looking again", smallest(entries_.size(), near), kRound, kLookAgain,
              [](Entry& entry, std::int64_t cutoff_ns) { entry.group->look_again(cutoff_ns); });
  }

  /// The groups with the smallest key, at most so many; kNever: not at all.
  template <class Key>
  std::vector<Entry*> smallest(std::size_t most, Key key) {
    std::vector<std::pair<std::int64_t, Entry*>> keyed;
    for (Entry& entry : entries_) {
      const std::int64_t mine = entry.group->candidates().empty() ? kNever : key(entry);
      if (mine != kNever) keyed.emplace_back(mine, &entry);
    }
    std::stable_sort(keyed.begin(), keyed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<Entry*> found;
    for (const auto& [value, entry] : keyed) found.push_back(entry);
    found.resize(std::min(found.size(), most));
    return found;
  }

  std::size_t meshes() const { return std::min(jobs_.size(), kMostMeshes); }
  Work of_all(const Work& one) const {
    const auto count = static_cast<std::int64_t>(meshes());
    return {one.actions * count, one.plans * count};
  }

  void spare() {
    const auto open = [&](const Entry& entry) {
      const std::int64_t least = entry.group->shortest_ns();
      const bool is_open = entry.group->job().memory_limit && scaled(least, kWorthLooking) < best_ns_;
      return is_open ? least : kNever;
    };
    in_rounds("making fit", smallest(entries_.size(), open), kRound, of_all(kSpare),
              [](Entry& entry, std::int64_t cutoff_ns) { entry.group->spare_most(cutoff_ns); });
    const auto promising = [&](const Entry& entry) {
      if (open(entry) == kNever) return kNever;
      const Candidate* fits = entry.group->fastest();
      // What does not fit with all computed again may with copies.
      return fits == nullptr ? scaled(entry.group->shortest_ns(), 1.5) : fits->step_ns;
    };
    in_rounds("making fit", undominated(smallest(kMostSpared * meshes(), promising)), kCloseRound, of_all(kSpare),
              [](Entry& entry, std::int64_t cutoff_ns) { entry.group->spare(cutoff_ns, plans_of(entry)); });
  }

  /// Of groups that differ in the size of what a schedule puts together, without those that take longer than another
  /// one and need more memory: what fits that one costs no more there.
  static std::vector<Entry*> undominated(const std::vector<Entry*>& chosen) {
    struct Needs {
      std::int64_t ns, bytes;
    };
    const auto needs = [](const Entry& entry) {
      const Candidate* least = nullptr;
      for (const auto& one : entry.group->candidates()) {
        if (least == nullptr || one->step_ns < least->step_ns) least = one.get();
      }
      return Needs{least->step_ns, least->memory()};
    };
    std::map<std::tuple<std::size_t, int, std::string>, std::vector<Needs>> kept;
    std::vector<std::pair<Needs, Entry*>> sorted;
    for (Entry* entry : chosen) sorted.emplace_back(needs(*entry), entry);
    std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
      return std::pair(a.first.ns, a.first.bytes) < std::pair(b.first.ns, b.first.bytes);
    });
    std::vector<Entry*> dominated;
    for (const auto& [mine, entry] : sorted) {
      auto& alike = kept[{entry->job, entry->group->segments(), entry->group->order().name}];
      const bool is_less =
          std::all_of(alike.begin(), alike.end(), [&](const Needs& one) { return mine.bytes < one.bytes; });
      if (is_less) {
        alike.push_back(mine);
      } else {
        dominated.push_back(entry);
      }
    }
    std::vector<Entry*> found;
    for (Entry* entry : chosen) {
      if (std::find(dominated.begin(), dominated.end(), entry) == dominated.end()) found.push_back(entry);
    }
    return found;
  }

  void look_closely() {
    const auto promising = [&](const Entry& entry) {
      const Candidate* fastest = entry.group->fastest();
      if (fastest == nullptr || fastest->step_ns > scaled(best_ns_, kPromising)) return kNever;
      return fastest->step_ns;
    };
    in_rounds("looking closely", smallest(kMostClose, promising), kCloseRound, kLookClosely,
              [&](Entry& entry, std::int64_t cutoff_ns) {
                const Spared like = entry.group->fastest()->layout->spared;
                entry.group->look_closely(cutoff_ns, like, plans_of(entry));
                if (like == space_.sparing.fixed) return;
                entry.group->look_closely(cutoff_ns, space_.sparing.fixed, plans_of(entry));
              });
  }

  static std::size_t plans_of(const Entry& entry) {
    return static_cast<std::size_t>(std::max(kOfGroup.plans, kOfGroup.actions / entry.group->actions_of_a_plan()));
  }

  PlanFound of_job(std::size_t job) {
    PlanFound found;
    found.refused = refused_[job];
    found.least_ns = kNever;
    struct Place {
      const Entry* entry;
      const Candidate* candidate;
    };
    std::vector<Place> places, best_of_groups;
    for (const Entry& entry : entries_) {
      if (entry.job != job) continue;
      found.least_ns = std::min(found.least_ns, entry.group->least_ns());
      const Place* best = nullptr;
      const std::size_t first = places.size();
      for (const auto& one : entry.group->candidates()) places.push_back({&entry, one.get()});
      for (std::size_t k = first; k < places.size(); ++k) {
        if (best == nullptr || rank(places[k]) < rank(*best)) best = &places[k];
      }
      if (best != nullptr) best_of_groups.push_back(*best);
    }
    if (places.empty()) return found;
    const Place* chosen = &places.front();
    for (const Place& place : places) {
      if (rank(place) < rank(*chosen)) chosen = &place;
    }
    found.fits = chosen->entry->group->fits(*chosen->candidate);
    if (found.fits) {
      // Gathers that may begin at any time depend least on what was measured being right.
      const std::int64_t most = scaled(chosen->candidate->step_ns, kEqual);
      const auto better = [this](const Place& a, const Place& b) { return plain(a) < plain(b); };
      const Place* plainest = chosen;
      for (const Place& place : places) {
        if (place.candidate->step_ns > most || !place.entry->group->fits(*place.candidate)) continue;
        if (better(place, *plainest)) plainest = &place;
      }
      chosen = plainest;
    }
    // Where another job's plan is faster than all that this one could do, nobody has made it fit.
    if (!found.fits && best_ns_ != kNever) return found;
    found.best = *chosen->candidate;
    std::stable_sort(best_of_groups.begin(), best_of_groups.end(),
                     [this](const Place& a, const Place& b) { return rank(a) < rank(b); });
    for (const Place& place : best_of_groups) {
      if (place.entry != chosen->entry) found.runners_up.push_back(row(*place.entry, *place.candidate));
    }
    return found;
  }

  /// What is better comes first: fits, fast; if nothing fits, the least memory.
  template <class Place>
  std::tuple<int, std::int64_t, std::int64_t> rank(const Place& place) const {
    const Candidate& one = *place.candidate;
    if (place.entry->group->fits(one)) return {0, one.step_ns, 0};
    return {1, one.memory(), one.step_ns};
  }

  template <class Place>
  std::tuple<int, bool, int, SyncKind, std::int64_t, int> plain(const Place& place) const {
    const Candidate& one = *place.candidate;
    const Spared& spared = one.layout->spared;
    return {
        spared.ways(), place.entry->group->splits(), place.entry->group->segments(), kind_of(one.modes), one.step_ns,
        spared.percent};
  }

  const std::vector<PlanJob>& jobs_;
  const PlanSpace& space_;
  const SearchOptions& options_;
  std::vector<Entry> entries_;
  std::int64_t best_ns_;  // a step of the fastest that fits, of all jobs
  std::vector<std::string> refused_;
  PlanProgress state_;
};

}  // namespace

void one_by_one(std::size_t n, const std::function<void(std::size_t)>& body) {
  for (std::size_t k = 0; k < n; ++k) body(k);
}

std::vector<PlanFound> search_plans(const std::vector<PlanJob>& jobs, const PlanSpace& space,
                                    const SearchOptions& options) {
  return Search(jobs, space, options).run();
}

Candidate heuristic_plan(const PlanJob& job, const PlanSpace& space) {
  const auto sum = [](const auto& values) {
    return static_cast<double>(
        std::accumulate(values.begin(), values.end(), typename std::decay_t<decltype(values)>::value_type{}));
  };
  const double compute = (sum(job.forward) + sum(job.backward)) / job.pp * job.micro_batches;
  const double dp_sync = 2.0 * (job.dp - 1) / job.dp * (sum(job.gradient_bytes) / job.pp) / job.bandwidth;
  const auto largest = static_cast<double>(*std::max_element(job.activation_bytes.begin(), job.activation_bytes.end()));
  const double message = largest / job.pp_bandwidth + job.pp_latency;
  const std::vector<int> counts = segments_to_try(job, space);
  int segments = counts.front();
  for (const int count : counts) {
    const double pp_sync = job.pp > 1 ? (2 * count - 1) * job.micro_batches * message : 0.0;
    if (dp_sync + pp_sync > compute) break;
    segments = count;
  }
  const Ranges ranges = space.ranges ? *space.ranges : cut(job, segments);
  auto layout = std::make_shared<Layout>(layouts_of(job, ranges, space.bucket_bytes, space.sparing.fixed).back());
  const Modes modes = space.modes ? *space.modes : uniform_modes(job, *layout, space.ways.front());
  Programs programs(job, orders_to_try(job, space, segments).front(), segments);
  return programs.tried(job, std::move(layout), modes, -1, job.memory_limit || job.pool_limit);
}

}  // namespace fold3d::core
