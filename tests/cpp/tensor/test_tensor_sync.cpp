// TensorSync: sums and gathers of any size, to the bit, over loopback rings and TCP, ranks = threads.
#include "comm/tensor/tensor_sync.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "harness/ring_harness.h"
#include "harness/tensor_group.h"

namespace fold3d::test {
namespace {

using namespace std::chrono_literals;
using comm::Exchange;
using comm::Number;
using comm::Reduction;
using comm::Split;
using comm::TensorSync;

/// Up to so many elements sums go in the order of the ranks.
std::size_t whole_elements(int size) { return (64u << 10) / sizeof(float) / static_cast<std::size_t>(size - 1); }

void expect_clean(const TensorGroup& group, const std::function<void(int, TensorSync&)>& body) {
  for (const std::string& error : group.run(body)) EXPECT_EQ(error, "");
}

Exchange::Operation of(int rank, int size, Number number = Number::kFloat32, Reduction reduction = Reduction::kSum) {
  return {.rank = rank, .size = size, .number = number, .reduction = reduction};
}

std::vector<std::vector<float>> everybodys(int size, int number, std::size_t count) {
  std::vector<std::vector<float>> all;
  for (int rank = 0; rank < size; ++rank) all.push_back(contents<float>(rank, number, 0, count));
  return all;
}

/// The sum as Exchange promises it, of elements whose part of the tensor belongs to `owner`.
float sum_around(const std::vector<std::vector<float>>& all, std::size_t index, int owner) {
  const int size = static_cast<int>(all.size());
  float sum = 0;
  for (int k = 1; k <= size; ++k) {
    const float value = all[static_cast<std::size_t>((owner + k) % size)][index];
    sum = k == 1 ? value : sum + value;
  }
  return sum;
}

std::vector<float> all_reduced(int size, int number, std::size_t count) {
  const auto all = everybodys(size, number, count);
  const Split split{.rows = 1, .length = count, .unit_bytes = sizeof(float)};
  std::vector<float> sums;
  for (int owner = 0; owner < size; ++owner) {
    for (std::size_t i = split.first(owner, size); i < split.first(owner + 1, size); ++i) {
      sums.push_back(sum_around(all, i, count <= whole_elements(size) ? size - 1 : owner));
    }
  }
  return sums;
}

void all_reduces(const TensorGroup& group, const std::vector<std::size_t>& counts, bool in_place = false) {
  expect_clean(group, [&](int rank, TensorSync& sync) {
    std::vector<std::vector<float>> inputs, outputs;
    std::vector<TensorSync::Ticket> tickets;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      inputs.push_back(contents<float>(rank, static_cast<int>(i), 0, counts[i]));
      outputs.push_back(in_place ? inputs.back() : std::vector<float>(counts[i]));
    }
    for (std::size_t i = 0; i < counts.size(); ++i) {
      tickets.push_back(
          sync.issue(Exchange::all_reduce(of(rank, group.size), bytes_of(inputs[i]), writable_bytes_of(outputs[i]))));
    }
    for (std::size_t i = 0; i < counts.size(); ++i) {
      sync.wait(tickets[i]);
      if (outputs[i] != all_reduced(group.size, static_cast<int>(i), counts[i])) {
        throw std::runtime_error("a wrong sum of " + std::to_string(counts[i]) + " elements");
      }
      if (inputs[i] != contents<float>(rank, static_cast<int>(i), 0, counts[i])) throw std::runtime_error("input lost");
    }
  });
}

TEST(TensorSync, SumsToTheBitWhateverTheSizesAndTheTiming) {
  for (int size = 2; size <= 5; ++size) {
    const std::size_t whole = whole_elements(size);
    for (const bool in_place : {false, true}) {
      all_reduces({.size = size}, {1, 0, 2, 3, 7, 1000, whole, whole + 1, 30'011}, in_place);
      all_reduces({.size = size, .loopback = {.capacity = 100, .max_delay = 100us, .seed = 7}},
                  {5, 4097, 1, 0, whole + 5}, in_place);
    }
  }
}

TEST(TensorSync, SumsOverTcp) {
  for (int size = 2; size <= 4; ++size) all_reduces({.size = size, .over_tcp = true}, {1, 300'001, 0, 17, 1'000'000});
}

TEST(TensorSync, SumsOverHostsAreAnnounced) {
  const TensorGroup group{.size = 3, .hosts = {}};
  all_reduces(group, {100, 20'000});
}

/// Parts of [rows, length, width] elements along the middle dimension: a reduce-scatter, and the gather of its result.
void scatter_and_gather(const TensorGroup& group, std::size_t rows, std::size_t length, std::size_t width) {
  const std::size_t count = rows * length * width;
  const Split split{.rows = rows, .length = length, .unit_bytes = width * sizeof(float)};
  const auto all = everybodys(group.size, 0, count);
  std::vector<float> whole(count);
  for (int owner = 0; owner < group.size; ++owner) {
    for (std::size_t row = 0; row < rows; ++row) {
      const std::size_t first = (row * length + split.first(owner, group.size)) * width;
      const std::size_t end = (row * length + split.first(owner + 1, group.size)) * width;
      for (std::size_t i = first; i < end; ++i) whole[i] = sum_around(all, i, owner);
    }
  }
  expect_clean(group, [&](int rank, TensorSync& sync) {
    std::vector<float> part(split.part_bytes(rank, group.size) / sizeof(float)), gathered(count);
    const std::vector<float> input = contents<float>(rank, 0, 0, count);
    const auto operation = of(rank, group.size);
    sync.wait(sync.issue(Exchange::reduce_scatter(operation, split, bytes_of(input), writable_bytes_of(part))));
    sync.wait(sync.issue(Exchange::all_gather(operation, split, bytes_of(part), writable_bytes_of(gathered))));
    if (gathered != whole) {
      throw std::runtime_error("wrong parts of " + std::to_string(rows) + " x " + std::to_string(length) + " x " +
                               std::to_string(width));
    }
  });
}

TEST(TensorSync, ScattersAndGathersAlongAnyDimension) {
  for (int size = 2; size <= 4; ++size) {
    for (const auto& [rows, length, width] : std::vector<std::array<std::size_t, 3>>{
             {1, 4, 1}, {1, 13, 5}, {3, 12, 7}, {50, 9, 1}, {2, 3, 4000}, {7, 1, 30}, {4, 0, 3}, {300, 20, 40}}) {
      scatter_and_gather({.size = size}, rows, length, width);
      scatter_and_gather({.size = size, .loopback = {.capacity = 300, .max_delay = 50us, .seed = rows}}, rows, length,
                         width);
    }
    scatter_and_gather({.size = size, .over_tcp = true}, 4, 250, 300);
    scatter_and_gather({.size = size, .over_tcp = true}, 2000, 33, 3);
  }
}

TEST(TensorSync, ExchangesOverlapInTheOrderOfTheirIssue) {
  const TensorGroup group{.size = 3, .loopback = {.capacity = 64, .max_delay = 50us}};
  expect_clean(group, [&](int rank, TensorSync& sync) {
    constexpr int kCount = 40;
    std::vector<std::vector<float>> inputs, outputs(kCount, std::vector<float>(50));
    std::vector<TensorSync::Ticket> tickets;
    for (int i = 0; i < kCount; ++i) inputs.push_back(contents<float>(rank, i, 0, 50));
    for (int i = 0; i < kCount; ++i) {
      const auto n = static_cast<std::size_t>(i);
      tickets.push_back(
          sync.issue(Exchange::all_reduce(of(rank, 3), bytes_of(inputs[n]), writable_bytes_of(outputs[n]))));
      if (i % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(rank * 100));
    }
    sync.wait(tickets.back());
    for (int i = 0; i < kCount; ++i) {
      if (!sync.is_done(tickets[static_cast<std::size_t>(i)])) throw std::runtime_error("an earlier one is not done");
      if (outputs[static_cast<std::size_t>(i)] != all_reduced(3, i, 50)) throw std::runtime_error("a wrong sum");
    }
  });
}

TEST(TensorSync, AMaximumOfIntegers) {
  const TensorGroup group{.size = 4};
  expect_clean(group, [&](int rank, TensorSync& sync) {
    const std::vector<std::int64_t> input{rank, -rank, rank % 2 == 0 ? 100 : -100};
    std::vector<std::int64_t> output(3);
    const auto operation = of(rank, 4, Number::kInt64, Reduction::kMax);
    sync.wait(sync.issue(Exchange::all_reduce(operation, bytes_of(input), writable_bytes_of(output))));
    if (output != std::vector<std::int64_t>{3, 0, 100}) throw std::runtime_error("wrong maxima");
  });
}

TEST(TensorSync, RecordsAndCountersTellWhatTravelled) {
  const TensorGroup group{.size = 2};
  expect_clean(group, [&](int rank, TensorSync& sync) {
    const std::vector<float> input(1000, 1.0f);
    std::vector<float> output(1000);
    const auto all_reduce = [&] {
      sync.wait(sync.issue(Exchange::all_reduce(of(rank, 2), bytes_of(input), writable_bytes_of(output))));
    };
    all_reduce();
    if (!sync.account()->take_records().empty()) throw std::runtime_error("records that nobody asked for");
    sync.account()->keep_records(true);
    all_reduce();
    const auto records = sync.account()->take_records();
    if (records.size() != 1 || records[0].bytes != 4000 || records[0].kind != Exchange::Kind::kAllReduce) {
      throw std::runtime_error("a wrong record");
    }
    if (records[0].issued_ns > records[0].start_ns || records[0].start_ns > records[0].end_ns) {
      throw std::runtime_error("wrong times");
    }
    const auto counters = sync.account()->counters();
    if (counters.exchanges != 2 || counters.bytes != 8000 || counters.waited_ns <= 0) {
      throw std::runtime_error("wrong counters");
    }
    std::int64_t waited = 0;
    for (const auto& wait : sync.account()->take_waits()) waited += wait.end_ns - wait.start_ns;
    if (waited > counters.waited_ns || !sync.account()->take_waits().empty()) throw std::runtime_error("wrong waits");
  });
}

TEST(TensorSync, WhatNobodyWaitsForIsHidden) {
  using std::chrono::milliseconds;
  constexpr std::int64_t kMs = 1'000'000;
  const TensorGroup group{.size = 2};
  expect_clean(group, [&](int rank, TensorSync& sync) {
    const std::vector<float> input(1000, 1.0f);
    std::vector<float> output(1000);
    const auto issue = [&] {
      return sync.issue(Exchange::all_reduce(of(rank, 2), bytes_of(input), writable_bytes_of(output)));
    };
    sync.account()->keep_records(true);
    if (rank == 1) std::this_thread::sleep_for(milliseconds(300));  // late: rank 0 waits for it
    sync.wait(issue());
    auto counters = sync.account()->counters();
    if (rank == 0 && counters.waited_ns < 200 * kMs) throw std::runtime_error("waited too little");
    if (counters.hidden_ns > 100 * kMs) throw std::runtime_error("what was waited for is not hidden");
    if (rank == 0 && sync.account()->take_waits().size() != 1) throw std::runtime_error("there was one wait");

    const std::int64_t hidden = counters.hidden_ns;
    if (rank == 1) std::this_thread::sleep_for(milliseconds(300));
    const auto ticket = issue();
    std::this_thread::sleep_for(milliseconds(600));  // as if it computed
    sync.wait(ticket);
    counters = sync.account()->counters();
    if (rank == 0 && counters.hidden_ns - hidden < 200 * kMs) throw std::runtime_error("it was under way");
    if (counters.hidden_ns - hidden > 590 * kMs) throw std::runtime_error("it was over before that");
  });
}

TEST(TensorSync, MemoryIsKeptUntilNobodyReadsIt) {
  const TensorGroup group{.size = 2};
  expect_clean(group, [&](int rank, TensorSync& sync) {
    auto input = std::make_shared<std::vector<float>>(contents<float>(rank, 0, 0, 10'000));
    const std::weak_ptr<std::vector<float>> seen = input;
    std::vector<float> output(10'000);
    const std::span<const std::byte> bytes = bytes_of(*input);
    const auto ticket =
        sync.issue(Exchange::all_reduce(of(rank, 2), bytes, writable_bytes_of(output)), std::move(input));
    sync.wait(ticket);
    if (output != all_reduced(2, 0, 10'000)) throw std::runtime_error("a wrong sum");
    while (!seen.expired()) std::this_thread::yield();
  });
}

TEST(TensorSync, RefusesWhatDoesNotFit) {
  const std::vector<float> input(8);
  std::vector<float> output(7);
  EXPECT_THROW(Exchange::all_reduce(of(0, 2), bytes_of(input), writable_bytes_of(output)), std::invalid_argument);
  EXPECT_THROW(Exchange::all_reduce(of(2, 2), bytes_of(input),
                                    bytes_of(input).empty() ? std::span<std::byte>{} : writable_bytes_of(output)),
               std::invalid_argument);
  const Split split{.rows = 1, .length = 8, .unit_bytes = sizeof(float)};
  EXPECT_THROW(Exchange::reduce_scatter(of(0, 2), split, bytes_of(input), writable_bytes_of(output)),
               std::invalid_argument);
  EXPECT_THROW(Exchange::all_gather(of(0, 2), split, bytes_of(input), writable_bytes_of(output)),
               std::invalid_argument);
  const TensorGroup group{.size = 2};
  expect_clean(group, [&](int rank, TensorSync& sync) {
    EXPECT_THROW(sync.wait(0), std::invalid_argument);
    const std::vector<float> own(4);
    std::vector<float> sum(4);
    EXPECT_THROW(sync.issue(Exchange::all_reduce(of(rank, 3), bytes_of(own), writable_bytes_of(sum))),
                 std::invalid_argument);
  });
}

}  // namespace
}  // namespace fold3d::test
