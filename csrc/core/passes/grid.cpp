#include "core/passes/grid.h"

#include <algorithm>
#include <vector>

namespace fold3d::core {
namespace {

constexpr int kRowsAroundMark = 8;

std::string cell_text(const Schedule& schedule, std::size_t rank, int step, const std::optional<Cell>& mark) {
  const auto& actions = schedule.ranks[rank];
  const bool marked = mark && mark->rank == static_cast<int>(rank) && mark->step == step;
  const bool exists = step < static_cast<int>(actions.size());
  std::string text = exists ? to_string(actions[static_cast<std::size_t>(step)]) : marked ? "missing" : "";
  return marked ? ">" + text + "<" : text;
}

std::string pad(const std::string& text, std::size_t width) {
  return text + std::string(width > text.size() ? width - text.size() : 0, ' ');
}

}  // namespace

std::string grid(const Schedule& schedule, std::optional<Cell> mark, std::string_view message) {
  const std::size_t num_ranks = schedule.ranks.size();
  int end = 0;
  for (const auto& actions : schedule.ranks) end = std::max(end, static_cast<int>(actions.size()));
  int begin = 0;
  if (mark) {
    end = std::max(end, mark->step + 1);
    begin = std::max(0, mark->step - kRowsAroundMark);
  }
  const int last = end;
  if (mark) end = std::min(end, mark->step + kRowsAroundMark + 1);

  std::vector<std::size_t> widths(num_ranks);
  for (std::size_t r = 0; r < num_ranks; ++r) {
    widths[r] = ("rank " + std::to_string(r)).size();
    for (int step = begin; step < end; ++step)
      widths[r] = std::max(widths[r], cell_text(schedule, r, step, mark).size());
  }

  std::string text(message);
  if (!text.empty()) text += "\n";
  std::string header = pad("step", 6);
  for (std::size_t r = 0; r < num_ranks; ++r) header += " " + pad("rank " + std::to_string(r), widths[r]);
  header.erase(header.find_last_not_of(' ') + 1);
  text += header + "\n";
  if (begin > 0) text += "  ...  (" + std::to_string(begin) + " earlier steps)\n";
  for (int step = begin; step < end; ++step) {
    std::string row = pad(std::to_string(step), 6);
    for (std::size_t r = 0; r < num_ranks; ++r) row += " " + pad(cell_text(schedule, r, step, mark), widths[r]);
    if (mark && mark->step == step) {
      row += "  <-- here, rank " + std::to_string(mark->rank);
    } else {
      row.erase(row.find_last_not_of(' ') + 1);
    }
    text += row + "\n";
  }
  if (end < last) text += "  ...  (" + std::to_string(last - end) + " later steps)\n";
  return text;
}

}  // namespace fold3d::core
