#include "core/plan/spared.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

namespace fold3d::core {

bool Spared::recomputes() const {
  return std::any_of(again.begin(), again.end(), [](const Choice& choice) { return !choice.nothing(); });
}

bool Spared::rebuilds_blocks() const {
  return std::any_of(again.begin(), again.end(),
                     [](const Choice& choice) { return choice.every > 0 || choice.inside >= 0; });
}

std::vector<Choice> Spared::of_chunks(int chunks) const {
  const auto count = static_cast<std::size_t>(chunks);
  if (again.size() == 1) return std::vector<Choice>(count, again.front());
  if (again.size() != count) {
    throw std::invalid_argument("recompute is said of " + std::to_string(again.size()) +
                                " chunks, and the model is cut into " + std::to_string(chunks) +
                                " (pp * segments): say it of each, or once for all");
  }
  return again;
}

std::vector<bool> Spared::without_graph(int chunks) const {
  std::vector<bool> found;
  for (const Choice& choice : of_chunks(chunks)) found.push_back(chunks > 1 && choice.full);
  return found;
}

std::vector<bool> Spared::offloaded(int chunks) const {
  if (leaves == Leaves::kNothing) return {};
  std::vector<bool> moves(static_cast<std::size_t>(chunks), true);
  if (leaves == Leaves::kActivations) return moves;
  const std::vector<Choice> choices = of_chunks(chunks);
  for (std::size_t chunk = 0; chunk < choices.size(); ++chunk) moves[chunk] = choices[chunk].keeps_boundaries();
  if (std::find(moves.begin(), moves.end(), true) == moves.end()) return {};
  return moves;
}

std::vector<std::vector<bool>> Spared::recomputed_places(const std::vector<int>& counts, const Shape& shape) const {
  const std::vector<Choice> choices = of_chunks(static_cast<int>(counts.size()));
  std::map<std::pair<int, int>, int> passed;  // (stage, every): blocks so far
  std::vector<std::vector<bool>> found;
  for (std::size_t chunk = 0; chunk < counts.size(); ++chunk) {
    const int every = choices[chunk].full && counts.size() == 1 ? 1 : choices[chunk].every;
    auto& mine = found.emplace_back(static_cast<std::size_t>(counts[chunk]), false);
    if (every == 0) continue;
    int& number = passed[{shape.stage_of(static_cast<int>(chunk)), every}];
    for (std::size_t place = 0; place < mine.size(); ++place) mine[place] = number++ % every == 0;
  }
  return found;
}

}  // namespace fold3d::core
