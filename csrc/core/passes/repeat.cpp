#include "core/passes/repeat.h"

#include <algorithm>
#include <stdexcept>

#include "core/generators/registry.h"
#include "core/ir/action_kinds.h"
#include "core/ir/versions.h"
#include "core/passes/lower.h"
#include "core/passes/validate.h"

namespace fold3d::core {
namespace {

constexpr int kSteps = 5;  // at once: the pipeline fills, three that must be alike, what is left

bool is_of_forward(Kind kind) {
  return kind == Kind::kForward || kind == Kind::kSendForward || kind == Kind::kRecvForward;
}

/// In which step's list each action of a stage's stands: forwards in that of their step, a backward in that of the
/// forward which comes next, a message in that of what makes or takes it.
std::vector<int> cut(const std::vector<Action>& actions, int micro_batches) {
  std::vector<int> step(actions.size());
  std::vector<int> of_backward(static_cast<std::size_t>(kSteps * micro_batches), 0);
  int forwards = 0;
  for (const Action& action : actions) {
    if (action.kind == Kind::kForward) ++forwards;
    if (action.kind == Kind::kBackward) {
      of_backward[static_cast<std::size_t>(action.micro_batch)] = forwards / micro_batches;
    }
  }
  for (std::size_t k = 0; k < actions.size(); ++k) {
    const Action& action = actions[k];
    step[k] = is_of_forward(action.kind) ? action.micro_batch / micro_batches
                                         : of_backward[static_cast<std::size_t>(action.micro_batch)];
  }
  return step;
}

/// The step's list of each stage, with the numbers of one step, and REDUCE_GRAD.
Schedule list_of(const Schedule& steps, int micro_batches, int number) {
  Schedule list{{steps.shape.pp, steps.shape.segments, micro_batches}, {}};
  for (const auto& actions : steps.ranks) {
    const std::vector<int> step = cut(actions, micro_batches);
    auto& own = list.ranks.emplace_back();
    for (std::size_t k = 0; k < actions.size(); ++k) {
      if (step[k] != number) continue;
      const auto [chunk, kind, i] = actions[k];
      own.push_back({chunk, kind, i % micro_batches});
      const bool sends = chunk > 0 && steps.shape.pp > 1;
      const bool is_last = kind == (sends ? Kind::kSendBackward : Kind::kBackward);
      if (is_last && i % micro_batches == micro_batches - 1) own.push_back({chunk, Kind::kReduce, -1});
    }
  }
  return list;
}

/// What belongs to the step before, or the rest.
Schedule part_of(const Schedule& every, bool before) {
  Schedule part{every.shape, {}};
  for (const auto& actions : every.ranks) {
    const std::vector<bool> is_before = of_step_before(every.shape, actions);
    auto& own = part.ranks.emplace_back();
    for (std::size_t k = 0; k < actions.size(); ++k) {
      if (is_before[k] == before) own.push_back(actions[k]);
    }
  }
  return part;
}

/// The steps that the lists make, in one schedule without REDUCE_GRAD, which has no step.
Schedule joined(const Repeating& lists) {
  const Shape& one = lists.every.shape;
  Schedule steps{{one.pp, one.segments, kSteps * one.micro_batches}, {}};
  for (std::size_t stage = 0; stage < lists.every.ranks.size(); ++stage) {
    auto& own = steps.ranks.emplace_back();
    const auto add = [&](const std::vector<Action>& actions, int step, bool all_before) {
      const std::vector<bool> before = of_step_before(one, actions);
      for (std::size_t k = 0; k < actions.size(); ++k) {
        const auto [chunk, kind, i] = actions[k];
        if (kind == Kind::kReduce) continue;
        own.push_back({chunk, kind, (step - (before[k] || all_before ? 1 : 0)) * one.micro_batches + i});
      }
    };
    add(lists.first.ranks[stage], 0, false);
    for (int step = 1; step < kSteps; ++step) add(lists.every.ranks[stage], step, false);
    add(lists.drain.ranks[stage], kSteps, true);
  }
  return steps;
}

}  // namespace

Repeating without_flush(const std::string& name, const Shape& shape) {
  if (name != "1f1b") {
    throw std::invalid_argument("schedule '" + name + "' cannot be had without a flush; set schedule to 1f1b");
  }
  if (shape.micro_batches < shape.pp) {
    throw std::invalid_argument("without a flush a step needs at least as many micro-batches as stages (" +
                                to_string(shape) + "): else backwards are left to more than the next step");
  }
  const Shape all{shape.pp, shape.segments, kSteps * shape.micro_batches};
  const Schedule steps = lower(generate(name, {all, 0, ""}), {});
  Repeating lists;
  lists.every = list_of(steps, shape.micro_batches, 2);
  if (list_of(steps, shape.micro_batches, 3) != lists.every) {
    throw std::logic_error("schedule '" + name + "' does not repeat (" + to_string(shape) + ")");
  }
  lists.first = part_of(lists.every, false);
  lists.drain = part_of(lists.every, true);
  validate_steps(joined(lists), shape.micro_batches);
  return lists;
}

}  // namespace fold3d::core
