#pragma once

#include <vector>

#include "core/ir/schedule.h"

namespace fold3d::core {

/// The compute actions of a schedule as a graph, so that simulating a step asks the dependency rule only once.
struct SimulatedProgram {
  struct Edge {
    int node = 0;          // that waits
    int stage = 0;         // of that
    int border = 0;        // behind so many chunks, where a pipeline message carries the result
    bool through = false;  // whether one does
    bool forward = false;  // its direction
  };
  struct Copy {
    Action action;
    int user = -1;  // node that waits for the message which it brings from the pool
  };
  struct Node {
    Action action;
    int waits = 0;  // edges that end here
    std::vector<Edge> feeds;
    bool first_forward = false;  // of its chunk, in the rank's order
    bool step_before = false;    // what it does is left of the step before; see of_step_before()
    bool last_backward = false;  // of its chunk and a step: after it the chunk's gradients are complete
    bool turns = false;          // of the last chunk: the head's backward is a part of the forward
    bool last_of_head = false;   // a forward after which the head's gradients are complete
    std::vector<Copy> copies;    // that the rank comes to between the node before and this one
    std::vector<Action> waited;  // PREFETCHes that it waits for
  };
  Shape shape;
  std::vector<Node> nodes;
  std::vector<std::vector<int>> ranks;  // nodes of every stage in its order
  bool head_is_early = false;           // whether a node is last_of_head
  bool flushes = true;                  // no step leaves anything to the next one

  /// Throws std::invalid_argument if the schedule has no backward or lacks an action that another waits for.
  explicit SimulatedProgram(const Schedule& schedule);

 private:
  void turn_heads(const Schedule& schedule);
};

}  // namespace fold3d::core
