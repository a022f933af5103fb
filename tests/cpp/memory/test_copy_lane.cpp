// CopyLane: order, errors, the limit on its rate, ending.
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <stdexcept>
#include <vector>

#include "comm/base/clock.h"
#include "memory/copy_lane.h"
#include "memory/host_pool.h"
#include "memory/host_tier.h"
#include "memory/slot/tier.h"

namespace fold3d::memory {
namespace {

using namespace std::chrono_literals;

core::Action offload(int micro_batch) { return {0, core::Kind::kOffload, micro_batch}; }

std::shared_ptr<CopyRate> unlimited() { return std::make_shared<CopyRate>(0); }

TEST(CopyLane, CopiesInOrderWhileOthersComeBack) {
  constexpr int kCopies = 200;
  // Room for all: how far the lane that brings back is behind depends on the machine's load.
  HostPool pool([](std::size_t bytes) { return std::make_shared<HostTier>(bytes); }, kCopies * 8192);
  std::vector<std::vector<std::byte>> sources, targets(kCopies);
  for (int k = 0; k < kCopies; ++k) sources.emplace_back(8000, static_cast<std::byte>(k));
  std::vector<Slot> slots(kCopies);
  std::vector<CopyLane::Ticket> left(kCopies), came(kCopies);
  CopyLane out("out", unlimited()), in("in", unlimited());  // last: they end before what they copy is gone
  for (int k = 0; k < kCopies + 20; ++k) {
    if (k < kCopies) {
      std::vector<std::byte>& source = sources[static_cast<std::size_t>(k)];
      Slot slot = pool.take(source.size(), "0OFFLOAD0");
      left[static_cast<std::size_t>(k)] = out.submit(offload(k), source.size(), [&source, slot] {
        slot.write({{source.data(), source.size(), 0}});
        source.assign(source.size(), std::byte{255});  // memory that others use now
      });
      slots[static_cast<std::size_t>(k)] = slot;
    }
    if (k < 20) continue;
    const auto back = static_cast<std::size_t>(k - 20);
    out.wait(left[back], 10s);
    std::vector<std::byte>& target = targets[back];
    target.resize(8000);
    came[back] = in.submit(offload(k), target.size(), [&target, slot = std::exchange(slots[back], {})] {
      slot.read({{target.data(), target.size(), 0}});
    });
  }
  in.wait(came.back(), 10s);
  for (int k = 0; k < kCopies; ++k) {
    EXPECT_EQ(targets[static_cast<std::size_t>(k)], std::vector<std::byte>(8000, static_cast<std::byte>(k)));
  }
  const auto records = out.take_records();
  ASSERT_EQ(records.size(), 200u);
  for (int k = 0; k < kCopies; ++k) EXPECT_EQ(records[static_cast<std::size_t>(k)].action.micro_batch, k);
  EXPECT_EQ(pool.counters().in_use, 0);
}

TEST(CopyLane, AFailedCopyIsToldToAllWhoComeLaterAndNothingElseRuns) {
  CopyLane lane("out", unlimited());
  std::atomic<int> ran = 0;
  const auto good = lane.submit(offload(0), 1, [&] { ++ran; });
  lane.wait(good, 10s);
  const auto bad = lane.submit(offload(1), 1, [] { throw PoolError("the disk is gone"); });
  try {
    lane.wait(bad, 10s);
    FAIL();
  } catch (const PoolError& error) {
    EXPECT_STREQ(error.what(), "0OFFLOAD1: the disk is gone");
  }
  EXPECT_THROW(lane.submit(offload(2), 1, [&] { ++ran; }), PoolError);
  lane.wait(good, 10s);  // what is done stays done
  EXPECT_EQ(ran, 1);
}

TEST(CopyLane, WaitsEndByTimeAndBySignals) {
  std::promise<void> gate;
  CopyLane lane("out", unlimited());
  const auto ticket = lane.submit(offload(0), 1, [&] { gate.get_future().wait(); });
  EXPECT_FALSE(lane.is_done(ticket));
  EXPECT_THROW(lane.wait(ticket, 10ms), PoolError);
  EXPECT_THROW(lane.wait(ticket, 10s, [] { throw std::runtime_error("Ctrl-C"); }), std::runtime_error);
  gate.set_value();
  lane.wait(ticket, 10s);
  EXPECT_TRUE(lane.is_done(ticket));
}

TEST(CopyLane, WaitsForAllThatWasQueued) {
  CopyLane lane("out", unlimited());
  lane.wait_for_all(10ms);  // nothing
  std::promise<void> gate;
  auto memory = std::make_unique<std::vector<std::byte>>(1 << 20, std::byte{1});
  std::size_t sum = 0;
  for (int k = 0; k < 3; ++k) {
    lane.submit(offload(k), 1, [&, k] {
      if (k == 0) gate.get_future().wait();
      for (const std::byte each : *memory) sum += static_cast<std::size_t>(each);
    });
  }
  EXPECT_THROW(lane.wait_for_all(10ms), PoolError);
  gate.set_value();
  lane.wait_for_all(10s);
  memory.reset();  // nobody reads it any more
  EXPECT_EQ(sum, std::size_t{3} << 20);
  lane.submit(offload(3), 1, [] { throw PoolError("the disk is gone"); });
  EXPECT_THROW(lane.wait_for_all(10s), PoolError);
}

TEST(CopyLane, LanesShareTheRateOfTheirLink) {
  const auto rate = std::make_shared<CopyRate>(1e6);
  CopyLane out("out", rate), in("in", rate);
  const std::int64_t start = comm::now_ns();
  const auto first = out.submit(offload(0), 20'000, [] {});
  const auto second = in.submit(offload(1), 20'000, [] {});
  out.wait(first, 10s);
  in.wait(second, 10s);
  EXPECT_GE(comm::now_ns() - start, 40'000'000);
}

TEST(CopyLane, EndsInTheMiddleOfASlowCopyAndFreesWhatWaits) {
  const auto held = std::make_shared<int>(1);
  {
    CopyLane lane("out", std::make_shared<CopyRate>(1));  // a byte a second
    for (int k = 0; k < 3; ++k) lane.submit(offload(k), 1000, [held] {});
  }
  EXPECT_EQ(held.use_count(), 1);
}

}  // namespace
}  // namespace fold3d::memory
