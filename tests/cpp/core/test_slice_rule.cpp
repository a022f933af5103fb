// How a library's collectives are cut, and how long a slice is held back.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/network/slice_rule.h"

namespace fold3d::test {
namespace {

using core::SliceRule;

constexpr std::int64_t kKiB = 1 << 10, kMiB = 1 << 20;

TEST(SliceRule, ASliceIsWorthAMillisecondAndNeverLittleForAReplica) {
  EXPECT_EQ(SliceRule::bytes(2, 0), 4 * kMiB);  // nobody knows the speed
  EXPECT_EQ(SliceRule::bytes(8, 12.5e9), 12'500'000);
  EXPECT_EQ(SliceRule::bytes(2, 3e11), 64 * kMiB);
  EXPECT_EQ(SliceRule::bytes(512, 0), 511 * 256 * kKiB);
  for (const int replicas : {2, 8, 64, 512}) {
    for (const double speed : {0.0, 1e6, 125e6, 12.5e9, 1e12}) {
      EXPECT_GE(SliceRule::bytes(replicas, speed), 32 * kKiB * (replicas - 1)) << replicas << " at " << speed;
    }
    for (const double seconds : {1e-4, 1e-3, 4.9e-3}) {  // that 256 KiB for each take
      const double speed = 256 * kKiB * (replicas - 1) / seconds;
      EXPECT_GE(SliceRule::bytes(replicas, speed), 256 * kKiB * (replicas - 1)) << replicas << " at " << speed;
    }
  }
}

TEST(SliceRule, AMessageWaitsForLessWhereTheNetworkIsSlow) {
  EXPECT_EQ(SliceRule::bytes(2, 10e6), 50'000);  // 256 KiB would take 26 ms
  EXPECT_EQ(SliceRule::bytes(8, 10e6), 7 * 32 * kKiB);
  EXPECT_EQ(SliceRule::bytes(2, 1e3), 32 * kKiB);  // however slow it was found to be
  std::int64_t before = 0;
  for (double speed = 1e3; speed < 1e13; speed *= 1.5) {
    const std::int64_t bytes = SliceRule::bytes(8, speed);
    EXPECT_GE(bytes, before) << speed;
    before = bytes;
  }
}

TEST(SliceRule, EverySliceOfAShardBeginsWhereALineOfMemoryDoes) {
  for (const int replicas : {2, 3, 7, 16}) {
    for (const double speed : {1e6, 123456789.0, 1.3e9, 12.5e9, 3e11}) {
      const std::int64_t bytes = SliceRule::bytes(replicas, speed);
      for (const std::int64_t wire_bytes : {2, 4, 8}) {
        const std::int64_t length = SliceRule::shard_length(bytes, replicas, wire_bytes);
        EXPECT_EQ(length * wire_bytes % 128, 0) << replicas << " at " << speed;
        EXPECT_LE(length * wire_bytes * (replicas - 1), bytes);
        EXPECT_GT((length + 64) * wire_bytes * (replicas - 1), bytes) << "as long as that allows";
      }
    }
  }
  EXPECT_EQ(SliceRule::shard_length(4 * 40, 2, 4), 40);  // less than a line
  EXPECT_EQ(SliceRule::shard_length(3, 2, 4), 1);
}

TEST(SliceRule, AHoldIsFourTimesWhatTheSliceTakes) {
  EXPECT_EQ(SliceRule::longest_hold_ns(12'500'000, 12.5e9), 4'000'000);
  EXPECT_EQ(SliceRule::longest_hold_ns(4 * kMiB, 0), 4'000'000);  // supposed to take a millisecond
  EXPECT_EQ(SliceRule::longest_hold_ns(0, 12.5e9), 0);
  EXPECT_EQ(SliceRule::longest_hold_ns(64 * kMiB, 1.0), 4'000'000'000);  // a wrong measurement stops nothing
}

TEST(SliceRule, ReplicasAgreeOftenAtFirst) {
  std::vector<std::int64_t> found;
  for (std::int64_t number = 1; number <= 3100; ++number) {
    if (SliceRule::agrees_before(number)) found.push_back(number);
  }
  EXPECT_EQ(found, (std::vector<std::int64_t>{4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072}));
}

/// When the last of `slices` is through, if the replicas hold each back for as long as `hold_ns` says, two are under
/// way at most, and one moves when all have launched it.
template <class Hold>
std::int64_t through_ns(int replicas, int slices, std::int64_t slice_ns, Hold hold_ns) {
  std::vector<std::int64_t> launched(static_cast<std::size_t>(replicas), 0), done{0, 0};
  for (int slice = 0; slice < slices; ++slice) {
    for (int replica = 0; replica < replicas; ++replica) {
      std::int64_t& own = launched[static_cast<std::size_t>(replica)];
      own = std::max(own, done[done.size() - 2]) + hold_ns(replica, slice);
    }
    done.push_back(std::max(*std::max_element(launched.begin(), launched.end()), done.back()) + slice_ns);
  }
  return done.back();
}

TEST(SliceRule, DpSyncHasItsShareWhicheverReplicaHoldsIt) {
  constexpr int kSlices = 1000;
  constexpr std::int64_t kSliceNs = 1'000'000;
  const std::int64_t longest = SliceRule::longest_hold_ns(4 * kMiB, 0);
  for (const int replicas : {2, 7, 64}) {
    const auto in_turn = [&](int replica, int slice) { return slice % replicas == replica ? longest : 0; };
    const auto always = [&](int, int) { return longest; };
    const auto bound = static_cast<std::int64_t>((1 + SliceRule::kPatience) * kSlices) * kSliceNs;
    EXPECT_LE(through_ns(replicas, kSlices, kSliceNs, in_turn), bound);
    EXPECT_LE(through_ns(replicas, kSlices, kSliceNs, always), bound);
  }
}

}  // namespace
}  // namespace fold3d::test
