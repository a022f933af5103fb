#pragma once

#include <vector>

#include "core/ir/schedule.h"

namespace fold3d::core {

/// The compute actions of a schedule as a graph, so that simulating a step asks the dependency rule only once.
struct SimulatedProgram {
  struct Edge {
    int node = 0;          // that waits
    bool through = false;  // a pipeline message carries the result
  };
  struct Node {
    Action action;
    int waits = 0;  // edges that end here
    std::vector<Edge> feeds;
    bool first_forward = false;  // of its chunk, in the rank's order
    bool last_backward = false;  // likewise: after it the chunk's gradients are complete
    std::vector<Action> copies;  // OFFLOADs and PREFETCHes that the rank comes to between the node before and this one
    bool prefetched = false;     // it waits for the PREFETCH of its stash
  };
  Shape shape;
  std::vector<Node> nodes;
  std::vector<std::vector<int>> ranks;  // nodes of every stage in its order

  /// Throws std::invalid_argument if the schedule has no backward or lacks an action that another waits for.
  explicit SimulatedProgram(const Schedule& schedule);
};

}  // namespace fold3d::core
