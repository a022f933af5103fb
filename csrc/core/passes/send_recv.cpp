// SEND right after each action whose result another stage needs, its RECV in the receiver's list.
//
// The schedule is simulated (F = 1, B = 2) and its actions are taken in the total order (end time, rank); SEND and RECV
// enter both lists at the moment their producer ends. Every rank's list is thus a projection of one total order: no
// deadlock even if SEND and RECV block until they meet, and on each link the RECVs come in the order of the SENDs.
#include <algorithm>
#include <tuple>

#include "core/ir/deps.h"
#include "core/ir/timeline.h"
#include "core/passes/pass.h"

namespace fold3d::core {
namespace {

struct Completion {
  double end;
  int rank;
  Action action;
};

/// All compute actions in the order in which they end. Costs are positive, so what an action waits for comes
/// before it.
std::vector<Completion> completions(const Schedule& schedule) {
  std::vector<Completion> order;
  const Timeline timeline = unit_timeline(schedule);
  for (std::size_t rank = 0; rank < timeline.ranks.size(); ++rank) {
    for (const Span& span : timeline.ranks[rank]) order.push_back({span.end, static_cast<int>(rank), span.action});
  }
  std::sort(order.begin(), order.end(),
            [](const Completion& a, const Completion& b) { return std::tie(a.end, a.rank) < std::tie(b.end, b.rank); });
  return order;
}

}  // namespace

Schedule passes::send_recv(const Schedule& compute_only, const LoweringOptions&) {
  const Shape& shape = compute_only.shape;
  Schedule lowered{shape, std::vector<std::vector<Action>>(compute_only.ranks.size())};
  const auto list_of = [&](int chunk) -> std::vector<Action>& {
    return lowered.ranks[static_cast<std::size_t>(shape.stage_of(chunk))];
  };
  for (const Completion& done : completions(compute_only)) {
    list_of(done.action.chunk).push_back(done.action);
    if (const auto send = send_after(shape, done.action)) {
      list_of(send->chunk).push_back(*send);
      const Action recv = other_end(*send);
      list_of(recv.chunk).push_back(recv);
    }
  }
  return lowered;
}

}  // namespace fold3d::core
