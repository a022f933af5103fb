#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "core/ir/schedule.h"

namespace fold3d::core {

/// A cell of the grid: step = index into ranks[rank]; one past the end marks a missing action.
struct Cell {
  int rank = 0;
  int step = 0;
};

/// The schedule as text, one row per step and one column per rank. A marked cell is shown as >2B0< with an
/// arrow at its row and `message` above the grid; of a long schedule only the rows near the mark are shown.
std::string grid(const Schedule& schedule, std::optional<Cell> mark = std::nullopt, std::string_view message = "");

}  // namespace fold3d::core
