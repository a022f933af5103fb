// partition() against all divisions there are.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "core/partition.h"

namespace fold3d::core {
namespace {

struct Value {
  double largest = 0;
  double squares = 0;
  auto operator<=>(const Value&) const = default;
};

Value value_of(const std::vector<double>& cost, const std::vector<int>& begins) {
  Value value;
  for (std::size_t k = 0; k < begins.size(); ++k) {
    const int end = k + 1 < begins.size() ? begins[k + 1] : static_cast<int>(cost.size());
    double part = 0;
    for (int i = begins[k]; i < end; ++i) part += cost[static_cast<std::size_t>(i)];
    value.largest = std::max(value.largest, part);
    value.squares += part * part;
  }
  return value;
}

/// The best value over all ways to set parts-1 cuts, each cut a bit of a mask.
Value brute_force(const std::vector<double>& cost, int parts) {
  const int n = static_cast<int>(cost.size());
  Value best{1e300, 1e300};
  for (unsigned mask = 0; mask < 1u << (n - 1); ++mask) {
    std::vector<int> begins{0};
    for (int i = 1; i < n; ++i) {
      if (mask >> (i - 1) & 1u) begins.push_back(i);
    }
    if (static_cast<int>(begins.size()) == parts) best = std::min(best, value_of(cost, begins));
  }
  return best;
}

TEST(Partition, AsGoodAsBruteForce) {
  std::uint32_t state = 1;  // a small generator of our own: the same numbers with every standard library
  const auto next = [&state](std::uint32_t bound) { return (state = state * 1664525u + 1013904223u) / 65536u % bound; };
  for (int round = 0; round < 200; ++round) {
    std::vector<double> cost(1 + next(9));
    for (double& c : cost) c = next(20);
    const int parts = 1 + static_cast<int>(next(static_cast<std::uint32_t>(cost.size())));
    const std::vector<int> begins = partition(cost, parts);
    ASSERT_EQ(static_cast<int>(begins.size()), parts);
    EXPECT_EQ(begins.front(), 0);
    EXPECT_TRUE(std::adjacent_find(begins.begin(), begins.end(), std::greater_equal<>()) == begins.end());
    EXPECT_EQ(value_of(cost, begins), brute_force(cost, parts));
  }
}

TEST(Partition, RejectsWhatCannotBeDivided) {
  EXPECT_THROW(partition({1, 2}, 3), std::invalid_argument);
  EXPECT_THROW(partition({1, 2}, 0), std::invalid_argument);
  EXPECT_THROW(partition({}, 1), std::invalid_argument);
  EXPECT_THROW(partition({1, -1}, 1), std::invalid_argument);
}

}  // namespace
}  // namespace fold3d::core
