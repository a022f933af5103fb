#pragma once

#include <cstddef>
#include <cstdint>

#include "core/ir/action.h"

namespace fold3d::comm {

/// The four independent queues of a Communicator.
enum class QueueId : std::uint8_t { kSendForward, kRecvForward, kSendBackward, kRecvBackward };

inline constexpr std::size_t kNumQueues = 4;

/// Short name, also the name of the queue's thread: "send_f", "recv_f", "send_b", "recv_b".
const char* to_string(QueueId queue);

/// One transfer as it happened; times are std::chrono::steady_clock nanoseconds.
struct Record {
  core::Action action;
  QueueId queue = QueueId::kSendForward;
  std::int64_t start_ns = 0;  ///< send: the queue took it up; receive: its header had arrived
  std::int64_t end_ns = 0;    ///< the transfer was complete
  std::size_t bytes = 0;      ///< payload without the frame
};

}  // namespace fold3d::comm
