#include "core/passes/lower.h"

#include <stdexcept>

#include "core/passes/pass.h"
#include "core/passes/validate.h"

namespace fold3d::core {
namespace {

// What turns a schedule into programs, in this order. One line per pass.
constexpr Pass kPasses[] = {
    passes::send_recv,
    passes::reduce,
};

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
  Schedule lowered = compute_only;
  for (const Pass pass : kPasses) lowered = pass(lowered, {reduce});
  return lowered;
}

}  // namespace fold3d::core
