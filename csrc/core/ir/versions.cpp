#include "core/ir/versions.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/ir/action_kinds.h"
#include "core/ir/action_table.h"

namespace fold3d::core {
namespace {

bool is_backward(Kind kind) {
  switch (kind) {
    case Kind::kBackward:
    case Kind::kBackwardInput:
    case Kind::kBackwardWeight:
    case Kind::kSendBackward:
    case Kind::kRecvBackward:
      return true;
    default:
      return false;
  }
}

}  // namespace

std::vector<bool> of_step_before(const Shape& shape, const std::vector<Action>& actions) {
  ActionTable<char> is_done(shape, 0);
  ActionTable<char> is_before(shape, 0);  // by the B, or the W
  std::vector<bool> ends_before(static_cast<std::size_t>(shape.num_chunks()), false);
  for (const Action& action : actions) {
    if (!is_done.contains(action)) continue;
    is_done[action] = 1;
    if (action.kind != Kind::kBackward && action.kind != Kind::kBackwardWeight) continue;
    if (is_done[{action.chunk, Kind::kForward, action.micro_batch}]) continue;
    is_before[{action.chunk, Kind::kBackward, action.micro_batch}] = 1;
    ends_before[static_cast<std::size_t>(action.chunk)] = true;
  }
  std::vector<bool> before(actions.size(), false);
  for (std::size_t k = 0; k < actions.size(); ++k) {
    const Action& action = actions[k];
    if (!is_done.contains(action)) continue;
    if (is_backward(action.kind)) before[k] = is_before[{action.chunk, Kind::kBackward, action.micro_batch}] != 0;
    if (action.kind == Kind::kReduce) before[k] = ends_before[static_cast<std::size_t>(action.chunk)];
  }
  return before;
}

std::vector<Action> version_waits(const Shape& shape, const Action& action, int micro_batches,
                                  const OptionalActions& present) {
  constexpr int kBehind = 2;  // steps
  std::vector<Action> waits;
  const int step = action.kind == Kind::kForward ? action.micro_batch / micro_batches : 0;
  if (step < kBehind) return waits;
  for (int chunk = 0; chunk < shape.num_chunks(); ++chunk) {
    waits.push_back(present.last_backward(chunk, (step - kBehind + 1) * micro_batches - 1));
  }
  return waits;
}

VersionRule parse_version_rule(std::string_view text) {
  if (text == "2bw") return VersionRule::kTwo;
  if (text == "stashing") return VersionRule::kStashing;
  if (text == "vertical_sync") return VersionRule::kVerticalSync;
  throw std::invalid_argument("weight_versions is '" + std::string(text) +
                              "'; it must be 2bw, stashing or vertical_sync");
}

int version_of(VersionRule rule, const Shape& shape, int stage, int micro_batch) {
  if (rule == VersionRule::kTwo) return std::max(micro_batch / shape.micro_batches - 1, 0);
  return std::max(micro_batch + 1 - live_versions(rule, shape, stage), 0);
}

int live_versions(VersionRule rule, const Shape& shape, int stage) {
  if (rule == VersionRule::kTwo) return 2;
  return rule == VersionRule::kStashing ? shape.pp - stage : shape.pp;
}

}  // namespace fold3d::core
