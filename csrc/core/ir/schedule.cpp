#include "core/ir/schedule.h"

#include <algorithm>
#include <stdexcept>

#include "core/ir/action_kinds.h"

namespace fold3d::core {
namespace {

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const auto at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

bool is_blank(std::string_view text) { return text.find_first_not_of(" \t\r") == std::string_view::npos; }

std::vector<Action> parse_line(std::string_view line, std::size_t line_number) {
  std::vector<Action> actions;
  const auto cells = split(line, ',');
  for (std::size_t column = 0; column < cells.size(); ++column) {
    if (is_blank(cells[column])) continue;
    try {
      actions.push_back(parse_action(cells[column]));
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument("schedule CSV line " + std::to_string(line_number + 1) + ", column " +
                                  std::to_string(column + 1) + ": " + error.what());
    }
  }
  return actions;
}

/// Whether every action stands in the list of its chunk's stage.
bool fits(const Schedule& schedule) {
  for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    for (const Action& action : schedule.ranks[rank]) {
      if (schedule.shape.stage_of(action.chunk) != static_cast<int>(rank)) return false;
    }
  }
  return true;
}

template <class Test>
bool contains(const Schedule& schedule, Test test) {
  for (const auto& actions : schedule.ranks) {
    for (const Action& action : actions) {
      if (test(action.kind)) return true;
    }
  }
  return false;
}

}  // namespace

std::string to_string(Style style) { return style == Style::kV ? "v" : "loop"; }

Style parse_style(std::string_view text) {
  for (const Style style : {Style::kLoop, Style::kV}) {
    if (text == to_string(style)) return style;
  }
  throw std::invalid_argument("style='" + std::string(text) + "' is unknown: set style to 'loop' or 'v'");
}

std::string to_string(const Shape& shape) {
  return "pp=" + std::to_string(shape.pp) + " segments=" + std::to_string(shape.segments) +
         " m=" + std::to_string(shape.micro_batches) +
         (shape.style == Style::kLoop ? "" : " style=" + to_string(shape.style));
}

bool has_comm(const Schedule& schedule) {
  return contains(schedule, [](Kind kind) { return is_send(kind) || is_recv(kind); });
}

bool has_backward(const Schedule& schedule) {
  return contains(schedule, [](Kind kind) {
    const Occurs occurs = about(kind).occurs;
    return occurs == Occurs::kWhole || occurs == Occurs::kSplit;
  });
}

std::vector<int> reduce_order(const Schedule& schedule, int stage) {
  std::vector<int> chunks;
  for (const Action& action : schedule.ranks.at(static_cast<std::size_t>(stage))) {
    if (action.kind == Kind::kReduce) chunks.push_back(action.chunk);
  }
  return chunks;
}

std::string to_csv(const Schedule& schedule) {
  std::string text;
  for (const auto& actions : schedule.ranks) {
    for (std::size_t i = 0; i < actions.size(); ++i) {
      if (i > 0) text += ',';
      text += to_string(actions[i]);
    }
    text += '\n';
  }
  return text;
}

Schedule parse_csv(std::string_view text) {
  auto lines = split(text, '\n');
  while (!lines.empty() && is_blank(lines.back())) lines.pop_back();  // ends of line at the end of the file
  Schedule schedule;
  int last_chunk = -1;
  int last_micro_batch = -1;
  for (std::size_t line = 0; line < lines.size(); ++line) {
    schedule.ranks.push_back(parse_line(lines[line], line));
    for (const Action& action : schedule.ranks.back()) {
      last_chunk = std::max(last_chunk, action.chunk);
      last_micro_batch = std::max(last_micro_batch, action.micro_batch);
    }
  }
  if (last_micro_batch < 0)
    throw std::invalid_argument("the schedule CSV has no action: expected one line per rank, as in 0F0,0B0");
  const int pp = static_cast<int>(lines.size());
  schedule.shape = Shape{pp, last_chunk / pp + 1, last_micro_batch + 1};
  if (fits(schedule)) return schedule;
  schedule.shape.style = Style::kV;
  if (!fits(schedule)) schedule.shape.style = Style::kLoop;
  return schedule;
}

}  // namespace fold3d::core
