#include "core/plan/layer_reads.h"

#include <set>
#include <stdexcept>
#include <string>

namespace fold3d::core {
namespace {

std::size_t at(int number) { return static_cast<std::size_t>(number); }

void check_ranges(int blocks, const Ranges& ranges, int pp) {
  int end = 0;
  for (const auto& [first, next] : ranges) {
    if (first != end || next < first) break;
    end = next;
  }
  if (!ranges.empty() && end == blocks && ranges.back().second == end && ranges.size() % at(pp) == 0) return;
  throw std::invalid_argument(std::to_string(ranges.size()) + " chunks do not cover the " + std::to_string(blocks) +
                              " blocks in order, or cannot be spread over " + std::to_string(pp) + " stages");
}

}  // namespace

std::vector<int> LayerReads::unread_in(const std::pair<int, int>& range) const {
  std::vector<int> found;
  for (int block = range.first; block < range.second + (range.second == blocks()); ++block) {
    found.insert(found.end(), unread[at(block)].begin(), unread[at(block)].end());
  }
  return found;
}

std::vector<LayerRead> LayerReads::of_chunk(const std::pair<int, int>& range) const {
  std::vector<LayerRead> layers;
  if (range.first == 0) layers.push_back({0, before});
  for (int block = range.first; block < range.second + (range.second == blocks()); ++block) {
    layers.push_back({block + 1, reads[at(block)]});
  }
  if (layers.empty()) return layers;
  std::vector<int> first = by_all;
  const std::vector<int> never = unread_in(range);
  std::vector<int>& own = layers.front().parameters;
  first.insert(first.end(), never.begin(), never.end());
  first.insert(first.end(), own.begin(), own.end());
  own = std::move(first);
  return layers;
}

std::vector<std::vector<LayerRead>> LayerReads::completed(const Ranges& ranges, int pp, Style style) const {
  check_ranges(blocks(), ranges, pp);
  const Shape shape{pp, static_cast<int>(ranges.size()) / pp, 1, style};
  std::vector<std::set<int>> seen(at(pp));
  std::vector<std::vector<LayerRead>> chunks;
  for (int chunk = 0; chunk < shape.num_chunks(); ++chunk) {
    std::set<int>& mine = seen[at(shape.stage_of(chunk))];
    std::vector<LayerRead> layers = of_chunk(ranges[at(chunk)]);
    if (chunk < pp && !layers.empty()) {  // the first segment's chunk of this number is on the stage of this number
      std::vector<int>& first = layers.front().parameters;
      for (int segment = 0; segment < shape.segments; ++segment) {
        const std::vector<int> never = unread_in(ranges[at(shape.chunk_of(segment, chunk))]);
        first.insert(first.end(), never.begin(), never.end());
      }
    }
    for (LayerRead& layer : layers) {
      std::vector<int> fresh;
      for (const int parameter : layer.parameters) {
        if (mine.insert(parameter).second) fresh.push_back(parameter);
      }
      layer.parameters = std::move(fresh);
    }
    chunks.push_back(std::move(layers));
  }
  return chunks;
}

}  // namespace fold3d::core
