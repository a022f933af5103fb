// What is expected of a message, by what the steps before had.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "comm/base/shape_history.h"

namespace fold3d::test {
namespace {

using comm::ShapeHistory;
using comm::Shapes;

Shapes of(std::int64_t length, bool requires_grad = true) {
  return {{.dtype = 6, .element_bytes = 4, .requires_grad = requires_grad, .shape = {length}}};
}

/// One step of messages of chunk 3; returns for which of them its shapes were expected.
std::vector<bool> step(ShapeHistory& history, const std::vector<Shapes>& messages, bool trains = true) {
  std::vector<bool> expected;
  history.begin(trains);
  for (const Shapes& message : messages) {
    const Shapes* const found = history.expected(3);
    expected.push_back(found != nullptr);
    history.note(3, message);
  }
  return expected;
}

TEST(ShapeHistory, ExpectsWhatTwoStepsHad) {
  ShapeHistory history;
  EXPECT_EQ(step(history, {of(4), of(4)}), std::vector<bool>({false, false}));
  EXPECT_EQ(step(history, {of(4), of(4), of(4)}), std::vector<bool>({false, false, false}));
  EXPECT_EQ(step(history, {of(4), of(4)}), std::vector<bool>({true, true}));
  history.begin(true);
  ASSERT_NE(history.expected(3), nullptr);
  EXPECT_EQ(*history.expected(3), of(4));
  EXPECT_EQ(history.expected(2), nullptr);
}

TEST(ShapeHistory, ExpectsNothingWhereTheyDiffer) {
  ShapeHistory history;
  for (int k = 0; k < 4; ++k) EXPECT_EQ(step(history, {of(4), of(5)}), std::vector<bool>({false, false}));
  for (int k = 0; k < 4; ++k) EXPECT_EQ(step(history, {of(4 + k)}), std::vector<bool>({false}));
}

TEST(ShapeHistory, AMissEndsItForTheStepAndMakesItHarder) {
  ShapeHistory history;
  for (int k = 0; k < 2; ++k) step(history, {of(4), of(4)});
  EXPECT_EQ(step(history, {of(4), of(5), of(5)}), std::vector<bool>({true, true, false}));
  for (int k = 0; k < 4; ++k) EXPECT_EQ(step(history, {of(5)}), std::vector<bool>({false})) << k;
  EXPECT_EQ(step(history, {of(5)}), std::vector<bool>({true}));
  EXPECT_EQ(step(history, {of(6)}), std::vector<bool>({true}));
  for (int k = 0; k < 7; ++k) EXPECT_EQ(step(history, {of(6)}), std::vector<bool>({false})) << k;
  EXPECT_EQ(step(history, {of(6)}), std::vector<bool>({true}));
}

TEST(ShapeHistory, WhetherAGradientWillTravelBackIsPartOfIt) {
  ShapeHistory history;
  step(history, {of(4)});
  step(history, {of(4, false)});
  EXPECT_EQ(step(history, {of(4, false)}), std::vector<bool>({false}));
  EXPECT_EQ(step(history, {of(4, false)}), std::vector<bool>({true}));
}

TEST(ShapeHistory, TrainingAndEvaluationHaveTheirOwn) {
  ShapeHistory history;
  for (int k = 0; k < 3; ++k) {
    EXPECT_EQ(step(history, {of(4)}), std::vector<bool>({k == 2}));
    EXPECT_EQ(step(history, {of(9, false)}, false), std::vector<bool>({k == 2}));
  }
}

}  // namespace
}  // namespace fold3d::test
