#include "core/plan/sparing.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace fold3d::core {
namespace {

constexpr int kShares[] = {100, 50,
                           25};  // percent of the micro-batches whose stashes leave, where chunks compute again
constexpr int kFinest = 16;      // shares are looked at in so many steps, at most

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

bool Judge::all_fit(const Spared& spared) const {
  const std::vector<StagePeak> peaks = look(spared).peaks;
  return std::all_of(peaks.begin(), peaks.end(), fits);
}

std::optional<Spared> lighten(const PlanJob& job, const Spared& spared, const Judge& judge) {
  const int steps = std::min(job.micro_batches, kFinest);
  const auto share_of = [&](int step) {
    Spared share = spared;
    share.percent = (100 * step + steps - 1) / steps;
    return share;
  };
  int low = 0, high = steps;
  if (!judge.all_fit(share_of(high))) return std::nullopt;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (judge.all_fit(share_of(middle)) ? high : low) = middle;
  }
  return share_of(high);
}

std::optional<Spared> thin(const Ladder& ladder, const Judge& judge) {
  const Choice highest = ladder.steps.back();
  std::vector<Choice> choices(static_cast<std::size_t>(ladder.shape.num_chunks()), highest);
  const auto fits = [&] { return judge.all_fit(with(ladder.spared, choices)); };
  if (!fits()) return std::nullopt;
  std::vector<Choice> lower = {Choice{}};
  lower.insert(lower.end(), ladder.steps.begin(), ladder.steps.end() - 1);
  for (Choice& mine : choices) {
    for (const Choice& choice : lower) {
      mine = choice;
      if (fits()) break;
      mine = highest;
    }
    if (judge.hopeless({})) break;
  }
  return with(ladder.spared, choices);
}

std::optional<Spared> climb(const Ladder& ladder, const Judge& judge) {
  const auto stages = static_cast<std::size_t>(ladder.shape.pp);
  std::vector<int> enough(stages, ladder.top()), failed(stages, -1);
  if (!judge.all_fit(ladder.highest())) return std::nullopt;
  const auto is_open = [&](std::size_t stage) { return enough[stage] - failed[stage] > 1; };
  // Stages hardly depend on each other: all of them are halved at once.
  for (bool open = true; open;) {
    open = false;
    std::vector<int> least = failed;
    for (int& rung : least) ++rung;
    if (judge.hopeless(ladder.at(least))) return std::nullopt;
    std::vector<int> middle = enough;
    for (std::size_t stage = 0; stage < stages; ++stage) {
      if (!is_open(stage)) continue;
      middle[stage] = (failed[stage] + enough[stage]) / 2;
      open = true;
    }
    if (!open) break;
    const std::vector<StagePeak> peaks = judge.look(ladder.at(middle)).peaks;
    for (std::size_t stage = 0; stage < stages; ++stage) {
      (judge.fits(peaks[stage]) ? enough : failed)[stage] = middle[stage];
    }
  }
  for (int round = 0; round < ladder.top(); ++round) {
    const std::vector<StagePeak> peaks = judge.look(ladder.at(enough)).peaks;
    if (std::all_of(peaks.begin(), peaks.end(), judge.fits)) break;
    for (std::size_t stage = 0; stage < stages; ++stage) {
      if (!judge.fits(peaks[stage])) enough[stage] = std::min(enough[stage] + 1, ladder.top());
    }
  }
  if (ladder.spared.leaves == Spared::Leaves::kNothing || ladder.steps.empty()) return ladder.at(enough);
  const auto at_least = [&](int rung) {
    std::vector<int> rungs = enough;
    for (int& mine : rungs) mine = std::max(mine, rung);
    return ladder.at(rungs);
  };
  int rung = 0, width = ladder.top();
  std::int64_t step_ns = judge.look(ladder.at(enough)).step_ns;
  while (width > 1 && step_ns > judge.least_ns) {
    width = (width + 1) / 2;
    for (const int other : {rung - width, rung + width}) {
      if (other < 0 || other > ladder.top()) continue;
      const std::int64_t found_ns = judge.look(at_least(other)).step_ns;
      if (found_ns < step_ns) std::tie(step_ns, rung) = std::pair(found_ns, other);
    }
  }
  return at_least(rung);
}

}  // namespace fold3d::core
