#pragma once

#include <string>
#include <vector>

#include "core/ir/schedule.h"

namespace fold3d::core {

/// What a generator is asked for.
struct Params {
  Shape shape;         ///< its style is not looked at: the schedule decides that
  int group_size = 0;  ///< N: micro-batches that pass a segment before the next one starts; 0 = default
  std::string turn;    ///< how the last segment turns around, "all" or "1f1b"; "" = default
};

/// One entry of the registry. A parameter the schedule does not use must keep its default (segments 1,
/// group_size 0, turn "").
struct SchedulerInfo {
  std::string name;
  std::string help;
  bool uses_segments = false;
  bool uses_group_size = false;
  bool uses_turn = false;
  int segments = 0;  ///< the one number of segments that there can be; 0: any, or 1 where uses_segments is false
  Style style = Style::kLoop;
  /// Called with checked parameters, in whose shape the style is the entry's; gives a compute-only schedule.
  Schedule (*generate)(const Params&) = nullptr;

  /// Whether a model of so many segments can have this schedule.
  bool allows(int number) const { return segments == 0 ? uses_segments || number == 1 : number == segments; }
};

/// All schedules, in the order of the list in registry.cpp.
std::vector<SchedulerInfo> registry();

/// The compute-only schedule `name`. Any pp, segments, m >= 1. Deterministic. Throws std::invalid_argument
/// for an unknown name, a size below 1, or a parameter that the schedule does not use.
Schedule generate(const std::string& name, const Params& params);

}  // namespace fold3d::core
