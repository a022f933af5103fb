// Records of what a device does by itself: their times come later.
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <vector>

#include "comm/base/moment.h"
#include "comm/base/record_log.h"

namespace fold3d::test {
namespace {

using comm::Interval;
using comm::Record;

struct Device final : comm::LaterInterval {
  std::optional<Interval> known() override { return interval; }
  std::optional<Interval> interval;
};

std::vector<Record> take(comm::RecordLog& log) {
  std::vector<Record> records;
  log.take(records);
  return records;
}

TEST(RecordLog, WhatIsNotKnownYetStaysWithWhatComesAfter) {
  comm::RecordLog log;
  const auto first = std::make_shared<Device>(), second = std::make_shared<Device>();
  log.append({.action = {}, .start_ns = 1, .end_ns = 2, .bytes = 1});
  log.append({.action = {}, .start_ns = 3, .end_ns = 4, .bytes = 2}, first);
  log.append({.action = {}, .start_ns = 5, .end_ns = 6, .bytes = 3}, second);
  second->interval = {500, 600};

  const auto before = take(log);
  ASSERT_EQ(before.size(), 1U);
  EXPECT_EQ(before[0].end_ns, 2);
  EXPECT_TRUE(take(log).empty());

  first->interval = {300, 400};
  const auto after = take(log);
  ASSERT_EQ(after.size(), 2U);
  EXPECT_EQ(after[0].bytes, 2U);
  EXPECT_EQ(after[0].start_ns, 300);
  EXPECT_EQ(after[1].end_ns, 600);
  EXPECT_TRUE(take(log).empty());
}

TEST(Moment, IsKnownAtOnceUnlessADeviceHasToComeToIt) {
  const comm::Moment now(7);
  now.wait();
  EXPECT_EQ(now.ns(), 7);
}

}  // namespace
}  // namespace fold3d::test
