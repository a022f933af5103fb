#pragma once

#include "comm/record.h"
#include "comm/transport.h"
#include "core/action.h"
#include "core/schedule.h"

namespace fold3d::comm {

/// Lane of a SEND, RECV or REDUCE action. Throws std::invalid_argument for a compute action.
LaneId lane_of(core::Kind kind);

/// Direction of a SEND or RECV lane.
Channel channel_of(LaneId lane);

/// The other end of a SEND or RECV: the RECV that matches a SEND, or the SEND that matches a RECV. Forward
/// messages go from chunk c to c + 1, backward messages from c to c - 1; each end carries the number of its
/// own chunk.
core::Action other_end(const core::Action& action);

}  // namespace fold3d::comm
