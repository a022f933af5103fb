#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/ir/action.h"

namespace fold3d::core {

/// On which stage a chunk lives; the names are those of torch.distributed.pipelining.
enum class Style : std::uint8_t {
  kLoop,  ///< "loop": every segment runs from stage 0 to the last one: chunk v lives on stage v % pp
  kV,     ///< "v": every second segment runs back, from the last stage to stage 0, so neighbouring segments meet
};

/// "loop" or "v".
std::string to_string(Style style);

/// Inverse of to_string. Throws std::invalid_argument naming the text and the two forms.
Style parse_style(std::string_view text);

/// Size of a schedule, and where its chunks live.
struct Shape {
  int pp = 1;             ///< stages, >= 1
  int segments = 1;       ///< folds of the model, >= 1
  int micro_batches = 1;  ///< m per step and pipeline, >= 1
  Style style = Style::kLoop;

  int num_chunks() const { return pp * segments; }
  /// Its own inverse within a segment: the stage of a chunk, and the place in a segment of a stage's chunk.
  int mirrored(int segment, int place) const { return style == Style::kV && segment % 2 == 1 ? pp - 1 - place : place; }
  int stage_of(int chunk) const { return mirrored(chunk / pp, chunk % pp); }
  /// The one chunk of `segment` that lives on `stage`.
  int chunk_of(int segment, int stage) const { return segment * pp + mirrored(segment, stage); }
  bool operator==(const Shape&) const = default;
};

/// "pp=4 segments=2 m=8", for messages; with "style=v" where chunks do not live on stage v % pp.
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
/// shows: pp = number of lines, segments and m from the largest chunk and micro-batch, style v where all actions stand
/// on the line of v and not all on that of loop. parse_csv(to_csv(s)) == s for every complete schedule. Throws
/// std::invalid_argument with line and column of a cell that is not an action, or if there is no action at all.
Schedule parse_csv(std::string_view text);

}  // namespace fold3d::core
