#include <gtest/gtest.h>

#include "simdevice/core/history.h"

namespace simdevice {
namespace {

Use use(int stream, std::uint64_t tick, bool writes, std::uintptr_t begin = 0, std::uintptr_t bytes = 8) {
  return {dense(begin, bytes), writes, stream, tick, writes ? "writer" : "reader"};
}

VectorClock clock_of(std::initializer_list<int> streams) {
  VectorClock clock;
  for (const int stream : streams) clock.advance(static_cast<std::size_t>(stream));
  return clock;
}

TEST(History, ReportsWhatNothingOrders) {
  for (const bool first : {false, true}) {
    for (const bool second : {false, true}) {
      History history;
      EXPECT_EQ(history.add(use(0, 1, first), clock_of({0}), 0), "");
      EXPECT_EQ(history.add(use(1, 1, second), clock_of({1}), 0).empty(), !first && !second);
    }
  }
}

TEST(History, NamesBothAndTheBytes) {
  History history;
  history.add(use(0, 1, true, 100, 8), clock_of({0}), 96);
  EXPECT_EQ(
      history.add(use(1, 1, false, 104, 8), clock_of({1}), 96),
      "data race on the simulated device: reader (stream 1, reads) is not ordered after writer (stream 0, writes); "
      "both touch bytes 8 to 12 of one block");
}

TEST(History, AcceptsWhatIsOrdered) {
  History history;
  history.add(use(0, 1, true), clock_of({0}), 0);
  EXPECT_EQ(history.add(use(0, 2, true), clock_of({0, 0}), 0), "");
  EXPECT_EQ(history.add(use(1, 1, true), clock_of({0, 0, 1}), 0), "");
  EXPECT_EQ(history.add(use(2, 1, true, 8), clock_of({2}), 0), "");
}

TEST(History, KeepsAReaderThatAnotherReaderFollows) {
  History history;
  history.add(use(0, 1, false), clock_of({0}), 0);
  history.add(use(1, 1, false), clock_of({1}), 0);
  EXPECT_EQ(history.size(), 2u);
  EXPECT_NE(history.add(use(1, 2, true), clock_of({1, 1}), 0), "");
}

TEST(History, StaysShort) {
  History history;
  VectorClock clock;
  for (int run = 0; run < 1000; ++run) {
    history.add(use(0, clock.advance(0), true, 0, 64), clock, 0);
    history.add(use(0, clock.advance(0), false, 8 * (run % 8)), clock, 0);
  }
  EXPECT_LE(history.size(), 2u);
}

TEST(History, ForgetsWhatTheHostHasSeen) {
  History history;
  history.add(use(0, 1, true), clock_of({0}), 0);
  EXPECT_NE(history.check(use(kHost, 0, false), {}, 0), "");
  history.forget(clock_of({0}));
  EXPECT_EQ(history.size(), 0u);
  EXPECT_EQ(history.check(use(kHost, 0, false), {}, 0), "");
}

}  // namespace
}  // namespace simdevice
