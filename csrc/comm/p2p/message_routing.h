#pragma once

#include "comm/base/record.h"
#include "comm/p2p/transport.h"
#include "core/ir/action.h"

namespace fold3d::comm {

/// Whether the communicator moves it: a SEND or a RECV.
bool is_message(core::Kind kind);

/// TransferQueue of a SEND or RECV action. Throws std::invalid_argument for any other.
QueueId queue_of(core::Kind kind);

/// Direction of a queue's messages.
Channel channel_of(QueueId queue);

}  // namespace fold3d::comm
