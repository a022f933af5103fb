#include "core/passes/lower.h"

#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "core/ir/deps.h"
#include "core/ir/timeline.h"
#include "core/passes/validate.h"

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
  const Timeline timeline = simulate(schedule);
  for (std::size_t rank = 0; rank < timeline.ranks.size(); ++rank) {
    for (const Span& span : timeline.ranks[rank]) order.push_back({span.end, static_cast<int>(rank), span.action});
  }
  std::sort(order.begin(), order.end(),
            [](const Completion& a, const Completion& b) { return std::tie(a.end, a.rank) < std::tie(b.end, b.rank); });
  return order;
}

}  // namespace

Schedule lower(const Schedule& compute_only, bool reduce) {
  if (has_comm(compute_only)) {
    throw std::invalid_argument("lower() takes a compute-only schedule, this one already has SEND or RECV actions");
  }
  const bool forward_only = !has_backward(compute_only);
  if (forward_only && reduce) {
    throw std::invalid_argument("lower() cannot reduce gradients in a schedule without backward; pass reduce=false");
  }
  validate(compute_only, forward_only);
  const Shape& shape = compute_only.shape;
  const SplitBackward split(compute_only);
  std::vector<int> backwards_left(static_cast<std::size_t>(shape.num_chunks()), shape.micro_batches);

  Schedule lowered{shape, std::vector<std::vector<Action>>(compute_only.ranks.size())};
  const auto list_of = [&](int chunk) -> std::vector<Action>& {
    return lowered.ranks[static_cast<std::size_t>(shape.stage_of(chunk))];
  };
  for (const Completion& done : completions(compute_only)) {
    const Action& action = done.action;
    list_of(action.chunk).push_back(action);
    if (const auto send = send_after(shape, action)) {
      list_of(send->chunk).push_back(*send);
      const Action recv = other_end(*send);
      list_of(recv.chunk).push_back(recv);
    }
    if (action == split.last_backward(action.chunk, action.micro_batch) &&
        --backwards_left[static_cast<std::size_t>(action.chunk)] == 0 && reduce) {
      list_of(action.chunk).push_back({action.chunk, Kind::kReduce, -1});
    }
  }
  return lowered;
}

}  // namespace fold3d::core
