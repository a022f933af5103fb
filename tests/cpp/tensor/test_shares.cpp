// Exchanges of shares of all parts: together they are the whole exchange, to the bit, and touch nothing else.
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "comm/tensor/tensor_sync.h"
#include "harness/ring_harness.h"
#include "harness/tensor_group.h"

namespace fold3d::test {
namespace {

using comm::Exchange;
using comm::Share;
using comm::Split;
using comm::TensorSync;

Exchange::Operation of(int rank, int size, int share, int shares) {
  return {.rank = rank,
          .size = size,
          .number = comm::Number::kFloat32,
          .reduction = comm::Reduction::kSum,
          .share = {.index = share, .count = shares}};
}

void same(const std::vector<float>& found, const std::vector<float>& expected, const std::string& what) {
  if (found != expected) throw std::runtime_error("another " + what);
}

/// `length` units of `width` elements: a sum, its scattered parts, and these gathered, whole and in shares.
void compare(int size, std::size_t length, std::size_t width, int shares) {
  const std::size_t count = length * width;
  const Split split{.rows = 1, .length = length, .unit_bytes = width * sizeof(float)};
  const auto errors = TensorGroup{.size = size}.run([&](int rank, TensorSync& sync) {
    const std::vector<float> input = contents<float>(rank, 0, 0, count);
    std::vector<float> sum(count), cut_sum = input, gathered(count), cut_gathered(count);
    std::vector<float> part(split.part_bytes(rank, size) / sizeof(float)), cut_part(part.size());
    const auto whole = of(rank, size, 0, 1);
    sync.wait(sync.issue(Exchange::all_reduce(whole, bytes_of(input), writable_bytes_of(sum))));
    sync.wait(sync.issue(Exchange::reduce_scatter(whole, split, bytes_of(input), writable_bytes_of(part))));
    sync.wait(sync.issue(Exchange::all_gather(whole, split, bytes_of(part), writable_bytes_of(gathered))));
    for (int share = 0; share < shares; ++share) {
      const auto operation = of(rank, size, share, shares);
      // All of a kind at once: they follow each other closely.
      sync.issue(Exchange::all_reduce(operation, bytes_of(cut_sum), writable_bytes_of(cut_sum)));
      sync.issue(Exchange::reduce_scatter(operation, split, bytes_of(input), writable_bytes_of(cut_part)));
      sync.wait(sync.issue(Exchange::all_gather(operation, split, bytes_of(part), writable_bytes_of(cut_gathered))));
      const std::size_t first = split.first(rank, size);
      for (std::size_t unit = split.share_first(rank, size, {.index = share + 1, .count = shares});
           unit < first + split.part_length(rank, size); ++unit) {
        if (cut_part[(unit - first) * width] != 0) throw std::runtime_error("a later share has come");
      }
    }
    same(cut_part, part, "part");
    same(cut_gathered, gathered, "gathered tensor");
    if (count * sizeof(float) * static_cast<std::size_t>(size - 1) > (64u << 10)) same(cut_sum, sum, "sum");
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "") << size << " ranks, " << length << " x " << width;
}

TEST(Shares, TogetherAreTheWhole) {
  for (int size = 2; size <= 4; ++size) {
    for (const int shares : {2, 5}) {
      compare(size, 503, 41, shares);
      compare(size, 7, 5'000, shares);
      compare(size, 3, 2, shares);
      compare(size, 20'001, 1, shares);
    }
  }
}

TEST(Shares, ThatCannotBeAreRefused) {
  std::vector<float> in(24), out(12);
  const Split rows{.rows = 2, .length = 12, .unit_bytes = sizeof(float)};
  EXPECT_THROW(Exchange::reduce_scatter(of(0, 2, 0, 2), rows, bytes_of(in), writable_bytes_of(out)),
               std::invalid_argument);
  EXPECT_THROW(Exchange::all_gather(of(0, 2, 0, 2), rows, bytes_of(out), writable_bytes_of(in)), std::invalid_argument);
  std::vector<float> other(24);
  EXPECT_THROW(Exchange::all_reduce(of(0, 2, 0, 2), bytes_of(in), writable_bytes_of(other)), std::invalid_argument);
  EXPECT_THROW(Exchange::all_reduce(of(0, 2, 2, 2), bytes_of(in), writable_bytes_of(in)), std::invalid_argument);
}

}  // namespace
}  // namespace fold3d::test
