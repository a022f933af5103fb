// Actions and schedules as text.
#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "core/generators/registry.h"
#include "core/ir/action.h"
#include "core/ir/schedule.h"
#include "core/passes/grid.h"
#include "core/passes/lower.h"

namespace fold3d::core {
namespace {

TEST(ActionText, RoundTripOfEveryKind) {
  for (int k = 0; k < kNumKinds; ++k) {
    const Kind kind = static_cast<Kind>(k);
    const Action action{12, kind, kind == Kind::kReduce ? -1 : 7};
    EXPECT_EQ(parse_action(to_string(action)), action);
    EXPECT_EQ(parse_action(" " + to_string(action) + " \r"), action);
  }
  EXPECT_EQ(to_string(Action{1, Kind::kSendForward, 3}), "1SEND_F3");
  EXPECT_EQ(to_string(Action{0, Kind::kReduce, -1}), "0REDUCE_GRAD");
}

TEST(ActionText, RejectsWhatIsNoAction) {
  for (const char* text :
       {"", " ", "F0", "-1F0", "1F", "1", "1X0", "1F0x", "1F-1", "0REDUCE_GRAD3", "1f0", "9999999999F0"}) {
    EXPECT_THROW(parse_action(text), std::invalid_argument) << text;
  }
}

TEST(ScheduleText, RoundTrip) {
  const Schedule compute = generate("aiao", {Shape{3, 2, 4}, 0, ""});
  for (const Schedule& schedule : {compute, lower(compute, {.reduce = true})}) {
    EXPECT_EQ(parse_csv(to_csv(schedule)), schedule);
  }
}

TEST(ScheduleText, ReduceOrder) {
  const Schedule schedule = parse_csv("0F0,2F0,2B0,2REDUCE_GRAD,0B0,0REDUCE_GRAD\n1F0,3F0,3B0,1B0\n");
  EXPECT_EQ(reduce_order(schedule, 0), (std::vector<int>{2, 0}));
  EXPECT_TRUE(reduce_order(schedule, 1).empty());
  EXPECT_THROW(reduce_order(schedule, 2), std::out_of_range);
}

TEST(ScheduleText, ReadsIdleStepsAndForeignLineEnds) {
  EXPECT_EQ(parse_csv("0F0,,0B0\r\n,1F0,1B0\r\n"), parse_csv("0F0,0B0\n1F0,1B0"));
  const Shape expected{2, 2, 3};
  EXPECT_EQ(parse_csv("0F0,2F2\n1F0,3F1\n").shape, expected);
}

TEST(ScheduleText, ErrorNamesLineAndColumn) {
  try {
    parse_csv("0F0\n1F0,1Q0\n");
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("line 2, column 2: '1Q0'"), std::string::npos) << error.what();
  }
  EXPECT_THROW(parse_csv(""), std::invalid_argument);
  EXPECT_THROW(parse_csv("0REDUCE_GRAD"), std::invalid_argument);
}

TEST(Grid, MarksACellAndAMissingOne) {
  const Schedule schedule = parse_csv("0F0,0B0\n1F0\n");
  EXPECT_EQ(grid(schedule), "step   rank 0 rank 1\n0      0F0    1F0\n1      0B0\n");
  EXPECT_EQ(grid(schedule, Cell{1, 1}, "why"),
            "why\nstep   rank 0 rank 1\n0      0F0    1F0\n1      0B0    >missing<  <-- here, rank 1\n");
}

}  // namespace
}  // namespace fold3d::core
