#include "comm/p2p/links.h"

#include <stdexcept>

namespace fold3d::comm {

using core::Kind;

bool is_message(Kind kind) { return core::is_send(kind) || core::is_recv(kind); }

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
    default:
      throw std::invalid_argument("the communicator has lanes for SEND and RECV actions only");
  }
}

Channel channel_of(LaneId lane) {
  return lane == LaneId::kSendForward || lane == LaneId::kRecvForward ? Channel::kForward : Channel::kBackward;
}

}  // namespace fold3d::comm
