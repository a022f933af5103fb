#include "core/partition.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace fold3d::core {
namespace {

constexpr double kImpossible = std::numeric_limits<double>::infinity();

/// best[k][j] over the divisions of items 0..j-1 into k parts: `join` combines the value of the first k-1
/// parts with the weighted cost of part k. Returns the first item of every part of the division of all items with the
/// smallest value, and that value.
template <class Join>
std::pair<std::vector<int>, double> divide(const std::vector<double>& cost, int parts,
                                           const std::vector<double>& weights, Join join) {
  const int n = static_cast<int>(cost.size());
  const auto at = [n](int k, int j) { return static_cast<std::size_t>(k * (n + 1) + j); };
  std::vector<double> best(at(parts, n) + 1, kImpossible);
  std::vector<int> begin_of_last(at(parts, n) + 1, 0);
  best[at(0, 0)] = 0;
  for (int k = 1; k <= parts; ++k) {
    const double weight = weights.empty() ? 1 : weights[static_cast<std::size_t>(k - 1)];
    for (int j = k; j <= n; ++j) {
      double last_part = 0;
      for (int i = j - 1; i >= k - 1; --i) {
        last_part += cost[static_cast<std::size_t>(i)];
        const double value = join(best[at(k - 1, i)], weight * last_part);
        if (value >= best[at(k, j)]) continue;
        best[at(k, j)] = value;
        begin_of_last[at(k, j)] = i;
      }
    }
  }
  std::vector<int> begins(static_cast<std::size_t>(parts));
  for (int k = parts, j = n; k > 0; --k) begins[static_cast<std::size_t>(k - 1)] = j = begin_of_last[at(k, j)];
  return {begins, best[at(parts, n)]};
}

}  // namespace

std::vector<int> partition(const std::vector<double>& cost, int parts, const std::vector<double>& weights) {
  const int n = static_cast<int>(cost.size());
  if (parts < 1 || parts > n) {
    throw std::invalid_argument("cannot divide " + std::to_string(n) + " blocks into " + std::to_string(parts) +
                                " non-empty parts: pp * segments must lie between 1 and the number of blocks");
  }
  for (const auto* numbers : {&cost, &weights}) {
    for (const double c : *numbers) {
      if (!(c >= 0) || !std::isfinite(c)) {
        throw std::invalid_argument("the cost of a block must be a finite number >= 0, got " + std::to_string(c));
      }
    }
  }
  if (!weights.empty() && weights.size() != static_cast<std::size_t>(parts)) {
    throw std::invalid_argument(std::to_string(weights.size()) + " weights of " + std::to_string(parts) + " parts");
  }
  const auto larger = [](double before, double part) { return std::max(before, part); };
  const double largest = divide(cost, parts, weights, larger).second;
  const auto even = [largest](double before, double part) {
    return part > largest ? kImpossible : before + part * part;
  };
  return divide(cost, parts, weights, even).first;
}

}  // namespace fold3d::core
