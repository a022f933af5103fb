// The dependency rule and what follows from it.
#include <gtest/gtest.h>

#include <stdexcept>

#include "core/ir/deps.h"

namespace fold3d::core {
namespace {

const Shape kShape{2, 2, 2};  // chunks 0 2 on stage 0, chunks 1 3 on stage 1

std::string waits(const char* text, bool with_comm, const OptionalActions& present = {}) {
  std::string joined;
  for (const Action& action : waits_for(kShape, parse_action(text), with_comm, present)) {
    joined += (joined.empty() ? "" : " ") + to_string(action);
  }
  return joined;
}

TEST(Deps, Rule) {
  EXPECT_EQ(waits("0F0", true), "");
  EXPECT_EQ(waits("1F1", false), "0F1");
  EXPECT_EQ(waits("1F1", true), "1RECV_F1");
  EXPECT_EQ(waits("3B0", true), "3F0");
  EXPECT_EQ(waits("1B0", false), "1F0 2B0");
  EXPECT_EQ(waits("1B0", true), "1F0 1RECV_B0");
  EXPECT_EQ(waits("1SEND_F0", true), "1F0");
  EXPECT_EQ(waits("2RECV_F1", true), "1SEND_F1");
  EXPECT_EQ(waits("2SEND_B1", true), "2B1");
  EXPECT_EQ(waits("1RECV_B1", true), "2SEND_B1");
  EXPECT_EQ(waits("3REDUCE_GRAD", true), "3B0 3B1");
  EXPECT_THROW(waits("0RECV_F0", true), std::invalid_argument);
  EXPECT_THROW(waits("3RECV_B0", true), std::invalid_argument);
}

TEST(Deps, SplitBackward) {
  const OptionalActions present(Schedule{kShape, {{parse_action("2I0"), parse_action("2W0")}}});
  EXPECT_EQ(waits("1B0", false, present), "1F0 2I0");
  EXPECT_EQ(waits("1B1", false, present), "1F1 2B1");
  EXPECT_EQ(waits("2W0", false, present), "2I0");
  EXPECT_EQ(waits("2SEND_B0", true, present), "2I0");
  EXPECT_EQ(waits("2REDUCE_GRAD", true, present), "2W0 2B1");
}

TEST(Deps, Transfers) {
  for (const char* text : {"0SEND_F1", "3SEND_B0", "1RECV_F0", "2RECV_B1"}) {
    EXPECT_EQ(other_end(other_end(parse_action(text))), parse_action(text));
  }
  EXPECT_THROW(other_end(parse_action("0F0")), std::logic_error);
  EXPECT_EQ(send_after(kShape, parse_action("0F1")), parse_action("0SEND_F1"));
  EXPECT_EQ(send_after(kShape, parse_action("3I1")), parse_action("3SEND_B1"));
  EXPECT_FALSE(send_after(kShape, parse_action("3F1")));
  EXPECT_FALSE(send_after(kShape, parse_action("0B1")));
  EXPECT_FALSE(send_after(kShape, parse_action("2W1")));
  EXPECT_FALSE(send_after(Shape{1, 4, 2}, parse_action("0F1")));
  const Shape v{3, 2, 2, Style::kV};  // chunks 2 and 3 are on the last stage
  EXPECT_FALSE(send_after(v, parse_action("2F1")));
  EXPECT_FALSE(send_after(v, parse_action("3B1")));
  EXPECT_EQ(send_after(v, parse_action("3F1")), parse_action("3SEND_F1"));
}

}  // namespace
}  // namespace fold3d::core
