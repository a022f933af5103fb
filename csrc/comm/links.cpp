#include "comm/links.h"

#include <stdexcept>

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
  return lane == LaneId::kSendForward || lane == LaneId::kRecvForward ? Channel::kForward : Channel::kBackward;
}

}  // namespace fold3d::comm
