#include "core/plan/sparing.h"

#include <algorithm>

namespace fold3d::core {
namespace {

constexpr int kShares[] = {100, 50,
                           25};  // percent of the micro-batches whose stashes leave, where chunks compute again
constexpr int kFinest = 16;      // shares are looked at in so many steps, at most

bool all_fit(const Candidate& candidate, const Fits& fits) {
  return std::all_of(candidate.peaks.begin(), candidate.peaks.end(), fits);
}

/// Said once where it is the same of all chunks.
Spared with(Spared spared, const std::vector<Choice>& choices) {
  const bool alike = std::all_of(choices.begin(), choices.end(), [&](const auto& one) { return one == choices[0]; });
  spared.again = alike ? std::vector<Choice>{choices[0]} : choices;
  return spared;
}

}  // namespace

Spared Ladder::at(const std::vector<int>& rungs) const {
  if (steps.empty()) return spared;
  const int count = static_cast<int>(steps.size()), places = shape.segments;
  std::vector<Choice> choices(static_cast<std::size_t>(shape.num_chunks()));
  for (int stage = 0; stage < shape.pp; ++stage) {
    const int rung = rungs[static_cast<std::size_t>(stage)];
    for (int place = 0; place < places; ++place) {
      // Copies are best spread over the step.
      const int step = spared.leaves == Spared::Leaves::kNothing ? std::clamp(rung - count * place, 0, count)
                                                                 : (rung - place - 1 + places) / places;
      if (step == 0) continue;
      choices[static_cast<std::size_t>(shape.chunk_of(place, stage))] = steps[static_cast<std::size_t>(step - 1)];
    }
  }
  return with(spared, choices);
}

std::vector<Ladder> ladders(const PlanJob& job, const SparingSpace& space, int chunks) {
  using Leaves = Spared::Leaves;
  std::vector<Spared> leaving = {space.fixed};
  if (!space.leaving_is_free) {
    if (!space.again_is_free) return {};
  } else if (job.pool_is_elsewhere) {
    Spared other = space.fixed;
    other.leaves = Leaves::kBoundaries;
    leaving.push_back(other);
    other.leaves = Leaves::kActivations;
    for (const int share : kShares) {
      other.percent = share;
      leaving.push_back(other);
    }
  }
  std::vector<Ladder> found;
  for (const Spared& spared : leaving) {
    const bool is_share = spared != space.fixed && spared.percent < 100;  // of what leaves alone `lighten` finds it
    if (!is_share && !spared.offloaded(chunks).empty()) found.push_back({job.shape(chunks), {}, spared});
    if (!space.again_is_free) continue;
    // One chunk in one piece recomputes block by block.
    if (!is_share && chunks > 1) found.push_back({job.shape(chunks), {Choice{.full = true}}, spared});
    found.push_back({job.shape(chunks), {Choice{.every = 4}, Choice{.every = 2}, Choice{.every = 1}}, spared});
  }
  return found;
}

void lighten(const PlanJob& job, const Spared& spared, const TrySpared& tried, const Fits& fits) {
  const int steps = std::min(job.micro_batches, kFinest);
  const auto has_room = [&](int step) {
    Spared share = spared;
    share.percent = (100 * step + steps - 1) / steps;
    return all_fit(tried(share), fits);
  };
  int low = 0, high = steps;
  if (!has_room(high)) return;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (has_room(middle) ? high : low) = middle;
  }
}

void thin(const Ladder& ladder, const TrySpared& tried, const Fits& fits,
          const std::function<bool(const Spared&)>& hopeless) {
  std::vector<Choice> choices = ladder.highest().of_chunks(ladder.shape.num_chunks());
  if (!all_fit(tried(ladder.highest()), fits)) return;
  std::vector<Choice> lower = {Choice{}};
  lower.insert(lower.end(), ladder.steps.begin(), ladder.steps.end() - 1);
  for (Choice& mine : choices) {
    const Choice highest = mine;
    for (const Choice& choice : lower) {
      mine = choice;
      if (all_fit(tried(with(ladder.spared, choices)), fits)) break;
      mine = highest;
    }
    if (hopeless({})) return;
  }
}

void climb(const Ladder& ladder, const TrySpared& tried, const Fits& fits, std::int64_t least_ns,
           const std::function<bool(const Spared&)>& hopeless) {
  const auto stages = static_cast<std::size_t>(ladder.shape.pp);
  std::vector<int> enough(stages, ladder.top()), failed(stages, -1);
  if (!all_fit(tried(ladder.at(enough)), fits)) return;
  const auto is_open = [&](std::size_t stage) { return enough[stage] - failed[stage] > 1; };
  // Stages hardly depend on each other: all of them are halved at once.
  for (bool open = true; open;) {
    open = false;
    std::vector<int> least = failed;
    for (int& rung : least) ++rung;
    if (hopeless(ladder.at(least))) return;
    std::vector<int> middle = enough;
    for (std::size_t stage = 0; stage < stages; ++stage) {
      if (!is_open(stage)) continue;
      middle[stage] = (failed[stage] + enough[stage]) / 2;
      open = true;
    }
    if (!open) break;
    const std::vector<StagePeak> peaks = tried(ladder.at(middle)).peaks;
    for (std::size_t stage = 0; stage < stages; ++stage) (fits(peaks[stage]) ? enough : failed)[stage] = middle[stage];
  }
  for (int round = 0; round < ladder.top(); ++round) {
    const std::vector<StagePeak> peaks = tried(ladder.at(enough)).peaks;
    if (std::all_of(peaks.begin(), peaks.end(), fits)) break;
    for (std::size_t stage = 0; stage < stages; ++stage) {
      if (!fits(peaks[stage])) enough[stage] = std::min(enough[stage] + 1, ladder.top());
    }
  }
  if (ladder.spared.leaves == Spared::Leaves::kNothing || ladder.steps.empty()) return;
  const auto step_ns = [&](int rung) {
    std::vector<int> rungs = enough;
    for (int& mine : rungs) mine = std::max(mine, rung);
    return tried(ladder.at(rungs)).step_ns;
  };
  int rung = 0, width = ladder.top();
  while (width > 1 && step_ns(rung) > least_ns) {
    width = (width + 1) / 2;
    int best = rung;
    for (const int other : {rung - width, rung + width}) {
      if (other >= 0 && other <= ladder.top() && step_ns(other) < step_ns(best)) best = other;
    }
    rung = best;
  }
}

}  // namespace fold3d::core
