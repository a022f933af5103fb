#include "core/sim/simulated_program.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/ir/action_kinds.h"
#include "core/ir/action_table.h"
#include "core/ir/deps.h"
#include "core/ir/versions.h"
#include "core/passes/head.h"

namespace fold3d::core {

SimulatedProgram::SimulatedProgram(const Schedule& schedule) : shape(schedule.shape) {
  if (!has_backward(schedule)) {
    throw std::invalid_argument("the simulator runs training steps, but the schedule has no backward");
  }
  const OptionalActions present(schedule);
  ActionTable<int> node_of(shape, -1);
  ranks.resize(schedule.ranks.size());
  const auto num_chunks = static_cast<std::size_t>(shape.num_chunks());
  std::vector<int> last_backward(num_chunks, -1);
  std::vector<bool> forward_seen(num_chunks, false);
  for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    std::vector<Copy> copies;
    const std::vector<bool> before = of_step_before(shape, schedule.ranks[rank]);
    for (std::size_t k = 0; k < before.size(); ++k) {
      const Action& action = schedule.ranks[rank][k];
      if (is_copy(action.kind)) copies.push_back({action});
      if (!is_compute(action.kind)) continue;
      if (!node_of.contains(action)) {
        throw std::invalid_argument(to_string(action) + " lies outside " + to_string(shape));
      }
      const auto number = static_cast<int>(nodes.size());
      const auto chunk = static_cast<std::size_t>(action.chunk);
      const bool is_first = action.kind == Kind::kForward && !forward_seen[chunk];
      nodes.push_back({action, 0, {}, is_first, before[k], false, false, false, std::exchange(copies, {}), {}});
      flushes = flushes && !before[k];
      node_of[action] = number;
      ranks[rank].push_back(number);
      if (action.kind == Kind::kForward) forward_seen[chunk] = true;
      if (action != present.last_backward(action.chunk, action.micro_batch)) continue;
      const int last = last_backward[chunk];
      // What is left of a step stands before what the next one leaves.
      if (last < 0 || before[k] || !nodes[static_cast<std::size_t>(last)].step_before) last_backward[chunk] = number;
    }
  }
  for (const int number : last_backward) {
    if (number >= 0) nodes[static_cast<std::size_t>(number)].last_backward = true;
  }
  turn_heads(schedule);
  for (std::size_t number = 0; number < nodes.size(); ++number) {
    for (Action wait : waits_for(shape, nodes[number].action, /*with_comm=*/true, present)) {
      if (is_copy(wait.kind)) {
        nodes[number].waited.push_back(wait);
        continue;
      }
      const bool through = is_recv(wait.kind);
      // What the RECV waits for is its SEND, and that waits for the action that made the data.
      if (through) wait = waits_for(shape, other_end(wait), true, present).front();
      if (node_of[wait] < 0) {
        throw std::invalid_argument(to_string(nodes[number].action) + " waits for " + to_string(wait) +
                                    ", which the schedule lacks");
      }
      const int chunk = nodes[number].action.chunk;
      nodes[static_cast<std::size_t>(node_of[wait])].feeds.push_back(
          {static_cast<int>(number), shape.stage_of(chunk), std::min(wait.chunk, chunk), through, wait.chunk < chunk});
      ++nodes[number].waits;
    }
  }
  for (Node& node : nodes) {
    for (Copy& copy : node.copies) {
      if (about(copy.action.kind).neighbour == 0) continue;
      if (!is_recv(waits_for(shape, copy.action, /*with_comm=*/true, present).front().kind)) continue;
      const auto [chunk, kind, i] = copy.action;
      copy.user =
          node_of[kind == Kind::kPrefetchForward ? Action{chunk, Kind::kForward, i} : present.input_gradient(chunk, i)];
    }
  }
}

void SimulatedProgram::turn_heads(const Schedule& schedule) {
  const int last_chunk = shape.num_chunks() - 1;
  const auto stage = static_cast<std::size_t>(shape.stage_of(last_chunk));
  const std::vector<bool> turning = turning_heads(shape, schedule.ranks.at(stage));
  Node* last = nullptr;  // that adds to the head's gradients
  for (const int number : ranks[stage]) {
    Node& node = nodes[static_cast<std::size_t>(number)];
    if (node.action.chunk != last_chunk) continue;
    node.turns = turning[static_cast<std::size_t>(node.action.micro_batch)];
    if (node.turns == (node.action.kind == Kind::kForward)) last = &node;
  }
  if (last != nullptr) head_is_early = last->last_of_head = last->turns;
}

}  // namespace fold3d::core
