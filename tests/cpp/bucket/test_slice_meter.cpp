// The speed of a library's collectives, by their slices.
#include <gtest/gtest.h>

#include "comm/bucket/slice_meter.h"

namespace fold3d::test {
namespace {

using comm::SliceMeter;

TEST(SliceMeter, TheFastestOfLateCounts) {
  SliceMeter meter;
  EXPECT_EQ(meter.bandwidth(), 0);
  meter.took(1e6, 0);  // nobody can say how long
  EXPECT_EQ(meter.bandwidth(), 0);
  meter.took(1e6, 1e-1);  // waited for another replica
  meter.took(1e6, 1e-3);
  meter.took(1e6, 2e-3);  // beside another
  EXPECT_EQ(meter.bandwidth(), 1e9);
}

TEST(SliceMeter, ANetworkThatBecameSlowerIsNoticedWithinASecondOfSending) {
  SliceMeter meter;
  for (int slice = 0; slice < 100; ++slice) meter.took(1e6, 1e-3);
  double seconds = 0;
  for (; meter.bandwidth() > 0.9e9 && seconds < 10; seconds += 4e-3) meter.took(1e6, 4e-3);
  EXPECT_LT(seconds, 1.0);
  EXPECT_EQ(meter.bandwidth(), 0.25e9);
  meter.took(1e6, 1e-3);
  EXPECT_EQ(meter.bandwidth(), 1e9);
}

}  // namespace
}  // namespace fold3d::test
