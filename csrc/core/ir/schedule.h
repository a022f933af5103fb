#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/ir/action.h"

namespace fold3d::core {

/// Size of a schedule. Chunk v = segment * pp + stage lives on stage v % pp.
struct Shape {
  int pp = 1;             ///< stages, >= 1
  int segments = 1;       ///< folds of the model, >= 1
  int micro_batches = 1;  ///< m per step and pipeline, >= 1

  int num_chunks() const { return pp * segments; }
  int stage_of(int chunk) const { return chunk % pp; }
  bool operator==(const Shape&) const = default;
};

/// "pp=4 segments=2 m=8", for messages.
std::string to_string(const Shape& shape);

/// What every stage does in one step: ranks[s] is the ordered list of stage s. Compute-only (F, B, I, W) or
/// lowered (with SEND, RECV, REDUCE_GRAD). A plain value; validate() (core/validate.h) proves it right.
struct Schedule {
  Shape shape;
  std::vector<std::vector<Action>> ranks;
  bool operator==(const Schedule&) const = default;
};

/// True if a SEND or RECV occurs, i.e. the schedule has been lowered.
bool has_comm(const Schedule& schedule);

/// True if a B, I or W occurs; false for the forward-only schedules of evaluation.
bool has_backward(const Schedule& schedule);

/// The chunks of `stage` in the order of their REDUCE_GRAD actions. Throws std::out_of_range if there is no such stage.
std::vector<int> reduce_order(const Schedule& schedule, int stage);

/// One line per rank, cells separated by commas: the CSV of torch.distributed.pipelining.
std::string to_csv(const Schedule& schedule);

/// Reads what to_csv or torch wrote; empty cells (torch's idle steps) are dropped. The shape is what the text
/// shows: pp = number of lines, segments and m from the largest chunk and micro-batch. parse_csv(to_csv(s))
/// == s for every complete schedule. Throws std::invalid_argument with line and column of a cell that is not
/// an action, or if there is no action at all.
Schedule parse_csv(std::string_view text);

}  // namespace fold3d::core
