#include "core/ir/timeline.h"

#include <algorithm>
#include <stdexcept>

#include "core/ir/action_kinds.h"
#include "core/ir/action_table.h"
#include "core/ir/deps.h"

namespace fold3d::core {
namespace {

constexpr double kNotYet = -1;

class Simulation {
 public:
  Simulation(const Schedule& schedule, const Costs& costs)
      : schedule_(schedule),
        costs_(costs),
        present_(schedule),
        ends_(schedule.shape, kNotYet),
        busy_(schedule.ranks.size(), 0) {
    timeline_.ranks.resize(schedule.ranks.size());
  }

  Timeline run() {
    std::vector<std::size_t> next(schedule_.ranks.size(), 0);
    for (bool progress = true; progress;) {
      progress = false;
      for (std::size_t rank = 0; rank < next.size(); ++rank) {
        while (next[rank] < schedule_.ranks[rank].size() && start(rank, schedule_.ranks[rank][next[rank]])) {
          ++next[rank];
          progress = true;
        }
      }
    }
    for (std::size_t rank = 0; rank < next.size(); ++rank) {
      if (next[rank] < schedule_.ranks[rank].size()) {
        throw std::invalid_argument("the schedule stops: " + to_string(schedule_.ranks[rank][next[rank]]) +
                                    " on rank " + std::to_string(rank) +
                                    " waits for ever; validate() tells what is wrong");
      }
    }
    return std::move(timeline_);
  }

 private:
  /// Appends the action to its rank's timeline, or returns false if something it waits for has no end yet.
  bool start(std::size_t rank, const Action& action) {
    if (!is_compute(action.kind)) return true;
    auto& spans = timeline_.ranks[rank];
    double begin = spans.empty() ? 0 : spans.back().end;
    for (const Action& wait : waits_for(schedule_.shape, action, /*with_comm=*/false, present_)) {
      if (is_copy(wait.kind)) continue;  // beside what the rank computes
      if (ends_[wait] == kNotYet) return false;
      const bool same_stage = schedule_.shape.stage_of(wait.chunk) == schedule_.shape.stage_of(action.chunk);
      begin = std::max(begin, ends_[wait] + (same_stage ? 0 : costs_.send));
    }
    // As on any other chunk also where the input needs no gradient: a picture shows the schedule, not a model.
    const double cost = time_of(action.kind, /*chunk=*/1, costs_.forward, costs_.backward);
    ends_[action] = begin + cost;
    spans.push_back({action, begin, begin + cost});
    timeline_.makespan = std::max(timeline_.makespan, begin + cost);
    busy_[rank] += cost;
    timeline_.busy = std::max(timeline_.busy, busy_[rank]);
    return true;
  }

  const Schedule& schedule_;
  Costs costs_;
  OptionalActions present_;
  ActionTable<double> ends_;
  std::vector<double> busy_;  // compute time so far, per rank
  Timeline timeline_;
};

}  // namespace

Timeline unit_timeline(const Schedule& schedule, const Costs& costs) { return Simulation(schedule, costs).run(); }

}  // namespace fold3d::core
