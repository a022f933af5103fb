#include "core/passes/lower.h"

#include <optional>
#include <stdexcept>
#include <string>

#include "core/ir/action_kinds.h"
#include "core/passes/pass.h"
#include "core/passes/validate.h"

namespace fold3d::core {
namespace {

// What turns a schedule into programs, in this order. One line per pass.
constexpr Pass kPasses[] = {
    passes::send_recv, passes::recompute, passes::reduce, passes::offload, passes::lazy,
};

/// Whether the schedule has an action that a pass adds, and that lower() does not drop.
std::optional<Kind> added_already(const Schedule& schedule) {
  for (const auto& actions : schedule.ranks) {
    for (const Action& action : actions) {
      if (about(action.kind).occurs == Occurs::kAtWill) return action.kind;
    }
  }
  return std::nullopt;
}

void check_chunks(const char* name, const std::vector<bool>& values, const Schedule& schedule) {
  const auto chunks = static_cast<std::size_t>(schedule.shape.num_chunks());
  if (values.empty() || values.size() == chunks) return;
  throw std::invalid_argument(std::string(name) + " is said of " + std::to_string(values.size()) +
                              " chunks, and the schedule has " + std::to_string(chunks));
}

}  // namespace

Schedule lower(const Schedule& compute_only, const LoweringOptions& options) {
  if (has_comm(compute_only)) {
    throw std::invalid_argument("lower() takes a compute-only schedule, this one already has SEND or RECV actions");
  }
  if (const auto kind = added_already(compute_only)) {
    throw std::invalid_argument(
        "lower() takes a compute-only schedule, and adds " + std::string(to_string(*kind)) +
        " by itself: this one has it already. Leave it out and say of which chunks it is wanted");
  }
  check_chunks("recompute", options.recompute, compute_only);
  check_chunks("offload", options.offload, compute_only);
  const bool forward_only = !has_backward(compute_only);
  if (forward_only && options.reduce) {
    throw std::invalid_argument("lower() cannot reduce gradients in a schedule without backward; pass reduce=false");
  }
  if (options.prefetch_distance < 1) {
    throw std::invalid_argument("prefetch_distance is " + std::to_string(options.prefetch_distance) +
                                "; it must be at least 1");
  }
  if (!(options.offload_share > 0 && options.offload_share <= 1)) {
    throw std::invalid_argument("offload_share is " + std::to_string(options.offload_share) +
                                "; it must be above 0 and at most 1");
  }
  validate(compute_only, forward_only);
  Schedule lowered = compute_only;
  for (const Pass pass : kPasses) lowered = pass(lowered, options);
  return lowered;
}

}  // namespace fold3d::core
