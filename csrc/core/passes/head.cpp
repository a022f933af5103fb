#include "core/passes/head.h"

#include <optional>

#include "core/ir/action_kinds.h"

namespace fold3d::core {

std::vector<bool> turning_heads(const Shape& shape, const std::vector<Action>& actions) {
  std::vector<bool> turning(static_cast<std::size_t>(shape.micro_batches), false);
  std::vector<bool> again = turning;
  std::optional<Action> computed_last;  // at first what ends a list that repeats
  for (const Action& action : actions) {
    if (is_compute(action.kind)) computed_last = action;
  }
  for (const Action& action : actions) {
    if (!is_compute(action.kind)) continue;
    const auto i = static_cast<std::size_t>(action.micro_batch);
    if (action.chunk + 1 == shape.num_chunks() && i < turning.size()) {
      if (action.kind == Kind::kRecompute) again[i] = true;
      if (action.kind == Kind::kBackward || action.kind == Kind::kBackwardInput) {
        turning[i] = !again[i] && computed_last != Action{action.chunk, Kind::kForward, action.micro_batch};
      }
    }
    computed_last = action;
  }
  return turning;
}

}  // namespace fold3d::core
