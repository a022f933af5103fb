#include "core/passes/lower.h"

#include <stdexcept>
#include <string>

#include "core/passes/pass.h"
#include "core/passes/validate.h"

namespace fold3d::core {
namespace {

// What turns a schedule into programs, in this order. One line per pass.
constexpr Pass kPasses[] = {
    passes::send_recv,
    passes::recompute,
    passes::reduce,
};

bool recomputes(const Schedule& schedule) {
  for (const auto& actions : schedule.ranks) {
    for (const Action& action : actions) {
      if (action.kind == Kind::kRecompute) return true;
    }
  }
  return false;
}

}  // namespace

Schedule lower(const Schedule& compute_only, const LoweringOptions& options) {
  if (has_comm(compute_only)) {
    throw std::invalid_argument("lower() takes a compute-only schedule, this one already has SEND or RECV actions");
  }
  if (recomputes(compute_only)) {
    throw std::invalid_argument(
        "lower() takes a compute-only schedule, and adds RECOMPUTE by itself: this one has it already. Leave it out "
        "and "
        "say which chunks recompute");
  }
  const auto chunks = static_cast<std::size_t>(compute_only.shape.num_chunks());
  if (!options.recompute.empty() && options.recompute.size() != chunks) {
    throw std::invalid_argument("recompute is said of " + std::to_string(options.recompute.size()) +
                                " chunks, and the schedule has " + std::to_string(chunks));
  }
  const bool forward_only = !has_backward(compute_only);
  if (forward_only && options.reduce) {
    throw std::invalid_argument("lower() cannot reduce gradients in a schedule without backward; pass reduce=false");
  }
  validate(compute_only, forward_only);
  Schedule lowered = compute_only;
  for (const Pass pass : kPasses) lowered = pass(lowered, options);
  return lowered;
}

}  // namespace fold3d::core
