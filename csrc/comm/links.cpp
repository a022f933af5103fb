#include "comm/links.h"

#include <stdexcept>
#include <string>

namespace fold3d::comm {

using core::Kind;

LaneId lane_of(Kind kind) {
  switch (kind) {
    case Kind::kSendForward:
      return LaneId::kSendForward;
    case Kind::kRecvForward:
      return LaneId::kRecvForward;
    case Kind::kSendBackward:
      return LaneId::kSendBackward;
    case Kind::kRecvBackward:
      return LaneId::kRecvBackward;
    case Kind::kReduce:
      return LaneId::kReduce;
    default:
      throw std::invalid_argument("a compute action has no lane in the communicator");
  }
}

Channel channel_of(LaneId lane) {
  return lane == LaneId::kSendForward || lane == LaneId::kRecvForward ? Channel::kForward
                                                                      : Channel::kBackward;
}

core::Action other_end(const core::Action& action) {
  switch (action.kind) {
    case Kind::kSendForward:
      return {.chunk = action.chunk + 1, .kind = Kind::kRecvForward, .micro_batch = action.micro_batch};
    case Kind::kRecvForward:
      return {.chunk = action.chunk - 1, .kind = Kind::kSendForward, .micro_batch = action.micro_batch};
    case Kind::kSendBackward:
      return {.chunk = action.chunk - 1, .kind = Kind::kRecvBackward, .micro_batch = action.micro_batch};
    case Kind::kRecvBackward:
      return {.chunk = action.chunk + 1, .kind = Kind::kSendBackward, .micro_batch = action.micro_batch};
    default:
      throw std::invalid_argument(core::to_string(action) + " is no message and has no other end");
  }
}

}  // namespace fold3d::comm
