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

/// Whether a message, or the backward where nothing is sent, is the last of a micro-batch on its chunk.
bool ends_backward(const Shape& shape, const Action& action) {
  const bool sends = action.chunk > 0 && shape.pp > 1;
  return action.kind == (sends ? Kind::kSendBackward : Kind::kBackward);
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
      if (ends_backward(steps.shape, actions[k]) && i % micro_batches == micro_batches - 1) {
        own.push_back({chunk, Kind::kReduce, -1});
      }
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

/// Whether a stage that updates after each backward has the weights that each forward takes.
void check_versions(const Schedule& steps, VersionRule rule) {
  for (int stage = 0; stage < steps.shape.pp; ++stage) {
    int updates = 0;
    for (const Action& action : steps.ranks[static_cast<std::size_t>(stage)]) {
      if (action.kind == Kind::kBackward) ++updates;
      if (action.kind != Kind::kForward) continue;
      const int taken = version_of(rule, steps.shape, stage, action.micro_batch);
      if (taken > updates || taken <= updates - live_versions(rule, steps.shape, stage)) {
        throw std::logic_error(to_string(action) + " takes version " + std::to_string(taken) + " of " +
                               std::to_string(updates));
      }
    }
  }
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

std::vector<Schedule> by_micro_batch(int pp, int steps) {
  if (pp < 1 || steps < 1) {
    throw std::invalid_argument("pp=" + std::to_string(pp) + " steps=" + std::to_string(steps) + ": must be positive");
  }
  const Schedule all = lower(generate("1f1b", {{pp, 1, steps}, 0, ""}), {});
  const std::vector<std::vector<Action>> nothing(static_cast<std::size_t>(pp));
  std::vector<Schedule> lists(static_cast<std::size_t>(steps + pp - 1), Schedule{{pp, 1, pp}, nothing});
  for (int stage = 0; stage < pp; ++stage) {
    for (const Action& action : all.ranks[static_cast<std::size_t>(stage)]) {
      const int step = action.micro_batch + (is_of_forward(action.kind) ? 0 : pp - 1 - stage);
      auto& own = lists[static_cast<std::size_t>(step)].ranks[static_cast<std::size_t>(stage)];
      // What the next stage has sent in its list before may come first: else both would wait, each to be received from.
      const auto place = action.kind == Kind::kRecvBackward ? own.begin() : own.end();
      own.insert(place, {action.chunk, action.kind, action.micro_batch % pp});
      if (ends_backward(all.shape, action)) own.push_back({action.chunk, Kind::kReduce, -1});
    }
  }
  // As it runs: with the numbers of all steps again.
  Schedule joined{all.shape, nothing};
  for (int stage = 0; stage < pp; ++stage) {
    const auto s = static_cast<std::size_t>(stage);
    for (int step = 0; step < steps + pp - 1; ++step) {
      for (const Action& action : lists[static_cast<std::size_t>(step)].ranks[s]) {
        if (action.kind == Kind::kReduce) continue;
        const int number = step - (is_of_forward(action.kind) ? 0 : pp - 1 - stage);
        joined.ranks[s].push_back({action.chunk, action.kind, number});
      }
    }
  }
  validate(joined);
  for (const VersionRule rule : {VersionRule::kStashing, VersionRule::kVerticalSync}) check_versions(joined, rule);
  return lists;
}

}  // namespace fold3d::core
