// How often a device is looked at while somebody waits for it.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "comm/arbiter/poll_period.h"

namespace fold3d::test {
namespace {

using namespace std::chrono_literals;
using comm::PollPeriod;

TEST(PollPeriod, ALookIsLateByAPartOfTheWaitAndALongWaitCostsLittle) {
  const PollPeriod period;
  EXPECT_EQ(period.after(0s), 50us);
  EXPECT_EQ(period.after(100us), 50us);
  EXPECT_EQ(period.after(1600us), 200us);
  EXPECT_EQ(period.after(8ms), 1ms);
  EXPECT_EQ(period.after(1h), 1ms);
  EXPECT_EQ(PollPeriod(0s, 250us).after(1h), 250us);
  std::chrono::microseconds waited = 0us;
  int looks = 0;
  for (; waited < 1s; ++looks) waited += period.after(waited);
  EXPECT_LT(looks, 1050);
}

TEST(PollPeriod, AWaitOfTheUsualLengthTakesFewLooks) {
  const PollPeriod period(4ms);
  EXPECT_EQ(period.after(0s), 500us);
  EXPECT_EQ(period.after(4ms), 500us);
  EXPECT_EQ(period.after(6400us), 800us);
  EXPECT_EQ(PollPeriod(1h).after(0s), 1ms);
  EXPECT_EQ(PollPeriod(80us).after(0s), 50us);
  EXPECT_EQ(PollPeriod(1ms, 20us).after(0s), 20us);
}

TEST(PollPeriod, BeginsAnewWhenSomethingCame) {
  PollPeriod period;
  std::this_thread::sleep_for(10ms);
  EXPECT_EQ(period.next(), 1ms);
  period.restart();
  EXPECT_LT(period.next(), 1ms);
}

}  // namespace
}  // namespace fold3d::test
