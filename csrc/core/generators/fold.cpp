// The family fold(segments, N, turn): one virtual clock for all of it.
//
// Each action gets a time on a virtual clock, and each rank does its actions in the order of their times. A
// unit is what is not interrupted: one micro-batch for turn 1f1b, the group's N micro-batches for turn all.
// Let v be the position of a unit in the order "group by group, segment by segment" (backward: last segment
// first). Then
//
//   time of F on stage s = 2 v + hop s
//   time of B on stage s = 2 (v + lead) + hop (2 (pp - 1) - s) + 1
//
// so on every stage each unit owns one tick for its forward and one for its backward, and neighbouring stages
// are a hop apart. hop 1 gives 1F1B's warm-up of pp-1-s units, hop 2 Megatron's 2 (pp-1-s), which leaves a
// whole unit for the transfer. lead = (segments - 1) blocks: the first backward follows its forward through
// all segments.
//
// Every dependency goes forward in time: from stage to stage by a hop, from the last F to the first B by a
// tick, and from the last stage of a segment to stage 0 of the next because a block is given at least
// `min_slots` units, 2 min_slots > hop (pp - 1). So the ranks' orders are projections of one total order and
// cannot deadlock, whatever m, N, pp and segments are.
#include "core/generators/fold.h"

#include <algorithm>
#include <stdexcept>

#include "core/generators/registry.h"

namespace fold3d::core {
namespace {

struct Event {
  long time;
  Action action;
};

std::vector<int> group_sizes(int micro_batches, int group_size) {
  const int groups = std::max(1, micro_batches / group_size);
  std::vector<int> sizes(static_cast<std::size_t>(groups), micro_batches / groups);
  for (int g = 0; g < micro_batches % groups; ++g) ++sizes[static_cast<std::size_t>(g)];
  return sizes;
}

}  // namespace

Schedule fold_order(const Shape& shape, int group_size, Turn turn) {
  const auto& [pp, segments, m, style] = shape;
  const bool one_by_one = turn == Turn::kOneFOneB;
  const int hop = one_by_one && segments > 1 ? 2 : 1;
  const int min_slots = segments > 1 ? hop * (pp - 1) / 2 + 1 : 1;
  const auto slots_of = [&](int size) { return std::max(one_by_one ? size : 1, min_slots); };
  const std::vector<int> sizes = group_sizes(m, group_size);
  const int lead = (segments - 1) * slots_of(sizes.front());  // the first group is the largest

  Schedule schedule{shape, {}};
  for (int stage = 0; stage < pp; ++stage) {
    std::vector<Event> events;
    long group_begin = 0;
    int first = 0;
    for (const int size : sizes) {
      const int slots = slots_of(size);
      for (int segment = 0; segment < segments; ++segment) {
        const int chunk = segment * pp + stage;
        for (int i = 0; i < size; ++i) {
          const int unit = one_by_one ? i : 0;
          const long forward = group_begin + segment * slots + unit;
          const long backward = group_begin + (segments - 1 - segment) * slots + unit + lead;
          events.push_back({2 * forward + hop * stage, {chunk, Kind::kForward, first + i}});
          events.push_back({2 * backward + hop * (2 * (pp - 1) - stage) + 1, {chunk, Kind::kBackward, first + i}});
        }
      }
      group_begin += static_cast<long>(segments) * slots;
      first += size;
    }
    // Stable: the micro-batches of one unit share a time and stay in their order.
    std::stable_sort(events.begin(), events.end(), [](const Event& a, const Event& b) { return a.time < b.time; });
    auto& actions = schedule.ranks.emplace_back();
    for (const Event& event : events) actions.push_back(event.action);
  }
  return schedule;
}

namespace generators {

SchedulerInfo fold() {
  return {.name = "fold",
          .help = "the whole family: group_size N (default pp), turn 'all' or '1f1b' (default)",
          .uses_segments = true,
          .uses_group_size = true,
          .uses_turn = true,
          .generate = [](const Params& params) {
            if (!params.turn.empty() && params.turn != "all" && params.turn != "1f1b") {
              throw std::invalid_argument("turn='" + params.turn + "' is unknown: set turn to 'all' or '1f1b'");
            }
            const int group_size = params.group_size == 0 ? params.shape.pp : params.group_size;
            return fold_order(params.shape, group_size, params.turn == "all" ? Turn::kAll : Turn::kOneFOneB);
          }};
}

}  // namespace generators
}  // namespace fold3d::core
