#pragma once

#include "comm/record.h"
#include "comm/transport.h"
#include "core/action.h"

namespace fold3d::comm {

/// Lane of a SEND, RECV or REDUCE action. Throws std::invalid_argument for a compute action.
LaneId lane_of(core::Kind kind);

/// Direction of a SEND or RECV lane.
Channel channel_of(LaneId lane);

}  // namespace fold3d::comm
