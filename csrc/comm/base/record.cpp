#include "comm/base/record.h"

namespace fold3d::comm {

const char* to_string(QueueId queue) {
  switch (queue) {
    case QueueId::kSendForward:
      return "send_f";
    case QueueId::kRecvForward:
      return "recv_f";
    case QueueId::kSendBackward:
      return "send_b";
    case QueueId::kRecvBackward:
      break;
  }
  return "recv_b";
}

}  // namespace fold3d::comm
