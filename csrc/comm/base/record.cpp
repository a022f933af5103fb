#include "comm/base/record.h"

namespace fold3d::comm {

const char* to_string(LaneId lane) {
  switch (lane) {
    case LaneId::kSendForward:
      return "send_f";
    case LaneId::kRecvForward:
      return "recv_f";
    case LaneId::kSendBackward:
      return "send_b";
    case LaneId::kRecvBackward:
      break;
  }
  return "recv_b";
}

}  // namespace fold3d::comm
