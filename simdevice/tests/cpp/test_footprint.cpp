#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

#include "simdevice/core/footprint.h"

namespace simdevice {
namespace {

using Ints = std::vector<std::int64_t>;

std::set<std::uintptr_t> bytes_of(std::uintptr_t begin, const Ints& sizes, const Ints& strides, int element) {
  std::set<std::uintptr_t> elements{begin};
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    std::set<std::uintptr_t> next;
    for (const auto at : elements) {
      for (std::int64_t k = 0; k < sizes[i]; ++k)
        next.insert(at + static_cast<std::uintptr_t>(k * strides[i] * element));
    }
    elements = next;
  }
  std::set<std::uintptr_t> bytes;
  for (const auto at : elements) {
    for (int k = 0; k < element; ++k) bytes.insert(at + static_cast<std::uintptr_t>(k));
  }
  return bytes;
}

TEST(Footprint, ContiguousTensorsAreDense) {
  EXPECT_TRUE(footprint_of(100, {3, 4}, {4, 1}, 4).is_dense());
  EXPECT_TRUE(footprint_of(100, {3, 4}, {1, 3}, 4).is_dense());
  EXPECT_TRUE(footprint_of(100, {3, 4}, {0, 1}, 4).is_dense());
  EXPECT_EQ(footprint_of(100, {3, 4}, {4, 1}, 4).end, 148u);
  EXPECT_EQ(footprint_of(100, {}, {}, 8).end, 108u);
}

TEST(Footprint, ColumnsOfAMatrixDoNotOverlap) {
  const auto left = footprint_of(0, {8, 4}, {10, 1}, 4), right = footprint_of(16, {8, 6}, {10, 1}, 4);
  EXPECT_FALSE(overlap(left, right));
  EXPECT_TRUE(overlap(left, footprint_of(12, {8, 6}, {10, 1}, 4)));
  EXPECT_TRUE(overlap(left, dense(40, 4)));
  EXPECT_FALSE(overlap(left, dense(16, 24)));
  EXPECT_FALSE(overlap(left, dense(400, 24)));
}

TEST(Footprint, RandomTensorsOverlapWhereTheyShareABytes) {
  std::mt19937 random(1);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  int exact = 0, apart = 0;
  for (int run = 0; run < 3000; ++run) {
    const int pitch = draw(4, 9), element = draw(1, 2);
    const auto tensor = [&](std::uintptr_t* begin, Ints* sizes, Ints* strides) {
      *begin = static_cast<std::uintptr_t>(draw(0, 30) * element);
      *sizes = {draw(1, 4), draw(1, pitch)};
      *strides = {pitch, 1};
    };
    std::uintptr_t a_begin, b_begin;
    Ints a_sizes, a_strides, b_sizes, b_strides;
    tensor(&a_begin, &a_sizes, &a_strides);
    tensor(&b_begin, &b_sizes, &b_strides);
    const auto a = footprint_of(a_begin, a_sizes, a_strides, element);
    const auto b = footprint_of(b_begin, b_sizes, b_strides, element);
    const auto ours = bytes_of(a_begin, a_sizes, a_strides, element);
    const auto theirs = bytes_of(b_begin, b_sizes, b_strides, element);
    bool share = false, inside = true;
    for (const auto at : theirs) share |= ours.count(at) > 0, inside &= ours.count(at) > 0;
    if (share) {
      ASSERT_TRUE(overlap(a, b) && overlap(b, a)) << run;
    }
    if (covers(a, b)) {
      ASSERT_TRUE(inside) << run;
    }
    apart += !share;
    exact += !share && !overlap(a, b);
  }
  EXPECT_EQ(exact, apart);
}

}  // namespace
}  // namespace simdevice
