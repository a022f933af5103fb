// A rank fails, stops or runs something else in the middle of a TP.sync: every rank ends with an error that tells why.
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/base/errors.h"
#include "harness/ring_harness.h"
#include "harness/tensor_group.h"

namespace fold3d::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using comm::Exchange;
using comm::Number;
using comm::RingFault;
using comm::Split;
using comm::TensorSync;

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// What an exchange reads and writes, kept until none does: one that fails may still be reading when the wait for it
/// has ended.
struct Memory {
  std::vector<float> input, output;
};

std::shared_ptr<Memory> memory(std::vector<float> input, std::size_t count) {
  return std::make_shared<Memory>(Memory{std::move(input), std::vector<float>(count)});
}

/// Issues the sum of `count` elements.
TensorSync::Ticket issue_sum(TensorSync& sync, std::size_t count) {
  const auto own = memory(std::vector<float>(count, 1.0f), count);
  const Exchange::Operation operation{.rank = sync.rank(), .size = sync.size(), .number = Number::kFloat32};
  return sync.issue(Exchange::all_reduce(operation, bytes_of(own->input), writable_bytes_of(own->output)), own);
}

/// A few exchanges of every kind.
void exchanges(int rank, int size, TensorSync& sync) {
  const Exchange::Operation operation{.rank = rank, .size = size, .number = Number::kFloat32};
  const Split split{.rows = 3, .length = 2000, .unit_bytes = sizeof(float)};
  const std::vector<float> input = contents<float>(rank, 0, 0, 6000);
  for (int i = 0; i < 5; ++i) {
    const auto sum = memory(input, 6000), whole = memory({}, 6000);
    const auto part = memory(input, split.part_bytes(rank, size) / sizeof(float));
    sync.wait(sync.issue(Exchange::all_reduce(operation, bytes_of(sum->input), writable_bytes_of(sum->output)), sum));
    sync.wait(sync.issue(
        Exchange::reduce_scatter(operation, split, bytes_of(part->input), writable_bytes_of(part->output)), part));
    whole->input = part->output;
    sync.wait(sync.issue(
        Exchange::all_gather(operation, split, bytes_of(whole->input), writable_bytes_of(whole->output)), whole));
  }
}

TensorGroup random_group(std::mt19937_64& random, RingFault::Mode mode) {
  const int size = 2 + static_cast<int>(random() % 3);
  return {.size = size,
          .loopback = {.capacity = 1u << (4 + random() % 12),
                       .max_delay = std::chrono::microseconds(random() % 2 * 100),
                       .seed = random(),
                       .faults = {{.rank = static_cast<int>(random() % static_cast<unsigned>(size)),
                                   .call = static_cast<RingFault::Call>(random() % 2),
                                   .mode = mode,
                                   .after = static_cast<int>(random() % 12)}}}};
}

TEST(TensorFaults, AnExceptionInALinkEndsEveryRank) {
  for (int index = 0; index < 40; ++index) {
    std::mt19937_64 random(static_cast<std::uint64_t>(index));
    const TensorGroup group = random_group(random, RingFault::Mode::kThrow);
    int causes = 0;
    for (const std::string& error : group.run([&](int rank, TensorSync& sync) { exchanges(rank, group.size, sync); })) {
      causes += has(error, "injected failure") ? 1 : 0;
      EXPECT_TRUE(has(error, "injected failure") || has(error, "lost the connection")) << error;
      EXPECT_TRUE(has(error, "TP.sync ")) << error;
    }
    EXPECT_EQ(causes, 1) << "run " << index;
  }
}

TEST(TensorFaults, AStoppedRankIsNamedWithinTheTimeout) {
  for (int index = 0; index < 10; ++index) {
    std::mt19937_64 random(static_cast<std::uint64_t>(index));
    TensorGroup group = random_group(random, RingFault::Mode::kStop);
    group.timeout = 300ms;
    const auto begin = Clock::now();
    int timeouts = 0;
    for (const std::string& error : group.run([&](int rank, TensorSync& sync) { exchanges(rank, group.size, sync); })) {
      timeouts += has(error, "was not done after 0.300 s (setting comm_timeout)") ? 1 : 0;
      EXPECT_TRUE(has(error, "comm_timeout") || has(error, "lost the connection")) << error;
    }
    EXPECT_GE(timeouts, 1);
    EXPECT_LT(Clock::now() - begin, 10s);
  }
}

TEST(TensorFaults, ARankThatDoesNotComeIsNamed) {
  const TensorGroup group{.size = 2, .timeout = 200ms};
  const auto errors = group.run([&](int rank, TensorSync& sync) {
    if (rank == 1) {
      std::this_thread::sleep_for(500ms);
      return;
    }
    sync.wait(issue_sum(sync, 10));
  });
  EXPECT_EQ(
      errors[0],
      "rank 0: the TP.sync 0 (all-reduce of 40 bytes) was not done after 0.200 s (setting comm_timeout): TP.sync 0 "
      "(all-reduce of 40 bytes) waits for tensor-parallel rank 1, which sent 0 of 40 bytes");
  EXPECT_EQ(errors[1], "");
}

TEST(TensorFaults, DifferentOperationsMeet) {
  const TensorGroup group{.size = 2};
  const auto errors = group.run([&](int rank, TensorSync& sync) { sync.wait(issue_sum(sync, rank == 0 ? 10 : 12)); });
  int named = 0;
  for (const std::string& error : errors) {
    named += has(error, "expected a slice of the all-reduce 0 of 4") && has(error, "do not run the same operations");
    EXPECT_TRUE(has(error, "do not run the same operations") || has(error, "lost the connection")) << error;
  }
  EXPECT_GE(named, 1);
}

TEST(TensorFaults, AbortEndsAWaitAndEverythingAfterIt) {
  const TensorGroup group{.size = 2};
  const auto begin = Clock::now();
  const auto errors = group.run([&](int rank, TensorSync& sync) {
    if (rank == 1) {
      std::this_thread::sleep_for(50ms);
      sync.abort("rank 1 has enough");
      EXPECT_THROW(issue_sum(sync, 10), comm::AbortedError);
      return;
    }
    std::thread other([&] {
      std::this_thread::sleep_for(100ms);
      sync.abort("the job has failed");
    });
    const auto ticket = issue_sum(sync, 10);
    EXPECT_THROW(sync.wait(ticket), comm::CommError);
    EXPECT_THROW(sync.is_done(ticket), comm::CommError);
    other.join();
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"", ""}));
  EXPECT_LT(Clock::now() - begin, 10s);
}

TEST(TensorFaults, APeerThatLeavesOverTcpIsNamed) {
  const TensorGroup group{.size = 3, .over_tcp = true};
  const auto errors = group.run([&](int rank, TensorSync& sync) {
    if (rank == 1) return;
    exchanges(rank, 3, sync);
  });
  EXPECT_EQ(errors[1], "");
  for (const int rank : {0, 2}) {
    EXPECT_TRUE(has(errors[static_cast<std::size_t>(rank)], "lost the connection to tensor-parallel rank"))
        << errors[0];
  }
}

}  // namespace
}  // namespace fold3d::test
