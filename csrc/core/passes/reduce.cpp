// REDUCE_GRAD (DP.sync of the chunk) right after the last backward of each chunk, and after what sends its result.
#include "core/ir/deps.h"
#include "core/passes/pass.h"

namespace fold3d::core {

Schedule passes::reduce(const Schedule& lowered, const LoweringOptions& options) {
  if (!options.reduce) return lowered;
  const Shape& shape = lowered.shape;
  const OptionalActions present(lowered);
  std::vector<int> backwards_left(static_cast<std::size_t>(shape.num_chunks()), shape.micro_batches);
  Schedule reduced{shape, {}};
  for (const auto& before : lowered.ranks) {
    auto& actions = reduced.ranks.emplace_back();
    for (std::size_t k = 0; k < before.size(); ++k) {
      const Action action = before[k];
      actions.push_back(action);
      if (action != present.last_backward(action.chunk, action.micro_batch)) continue;
      if (--backwards_left[static_cast<std::size_t>(action.chunk)] > 0) continue;
      const auto send = send_after(shape, action);
      if (send && k + 1 < before.size() && before[k + 1] == *send) actions.push_back(before[++k]);
      actions.push_back({action.chunk, Kind::kReduce, -1});
    }
  }
  return reduced;
}

}  // namespace fold3d::core
