#include "comm/p2p/message_routing.h"

#include <stdexcept>

namespace fold3d::comm {

using core::Kind;

bool is_message(Kind kind) { return core::is_send(kind) || core::is_recv(kind); }

QueueId queue_of(Kind kind) {
  switch (kind) {
    case Kind::kSendForward:
      return QueueId::kSendForward;
    case Kind::kRecvForward:
      return QueueId::kRecvForward;
    case Kind::kSendBackward:
      return QueueId::kSendBackward;
    case Kind::kRecvBackward:
      return QueueId::kRecvBackward;
    default:
      throw std::invalid_argument("the communicator has queues for SEND and RECV actions only");
  }
}

Channel channel_of(QueueId queue) {
  return queue == QueueId::kSendForward || queue == QueueId::kRecvForward ? Channel::kForward : Channel::kBackward;
}

}  // namespace fold3d::comm
