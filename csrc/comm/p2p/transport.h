#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "comm/base/moment.h"
#include "comm/base/tensor.h"

namespace fold3d::comm {

/// Direction of a pipeline message. The two directions are independent: neither may hold up the other.
enum class Channel : std::uint8_t { kForward, kBackward };

/// How bytes travel between ranks: one object per rank. All calls but abort() block.
///
/// A transport of device memory may work by streams: send and recv of a buffer then return once the device has been
/// told, and events order what the device does with the memory before and after. Frames block all the same.
///
/// Threads: send calls of a channel come from one thread, recv calls of a channel from another; all four may
/// be blocked at the same time. abort() is called by any.
///
/// Time: receives are posted ahead of need and sends wait for their receiver, so a call may rightly stay
/// blocked for most of a step. The Communicator sets the deadlines (of what the executor waits for) and calls
/// abort(); a transport's own time-out must therefore be longer than the longest step, and abort() must end
/// every blocked call promptly.
///
/// Errors: any exception ends the step; its text becomes the cause in the Communicator's error.
class Transport {
 public:
  virtual ~Transport() = default;

  /// A step begins; called by the thread that computes, while no other call is under way.
  virtual void begin() {}

  /// A step ends, likewise, when all its calls have returned. What the calling thread tells the device from now on
  /// comes after all sends.
  virtual void end() {}

  /// Whether it works by streams, see above.
  virtual bool works_by_stream() const { return false; }

  /// Sends buffer->bytes() bytes; returns when the memory may be reused, or, by streams, holds the buffer until then.
  virtual void send(Channel channel, int peer_stage, std::shared_ptr<Buffer> buffer) = 0;

  /// Fills all buffer->bytes() bytes; the sender sends exactly as many. The memory may have been used before
  /// and come from the pool: on a device, the write must be ordered after the work queued on it so far.
  virtual void recv(Channel channel, int peer_stage, std::shared_ptr<Buffer> buffer) = 0;

  /// As send and recv, for a frame in a place of kFrameBytes in host memory. What comes after its used_bytes() may
  /// arrive as anything. Frames and buffers of one channel and peer arrive in the order sent.
  virtual void send_frame(Channel channel, int peer_stage, std::span<const std::byte> frame) = 0;
  virtual void recv_frame(Channel channel, int peer_stage, std::span<std::byte> frame) = 0;

  /// A whole message: its frame, and each tensor of `payload` that has bytes. For the receiver the same as send_frame
  /// and a send for each; a transport may make fewer calls of it.
  virtual void send_message(Channel channel, int peer_stage, std::span<const std::byte> frame,
                            std::span<const Tensor> payload) {
    send_frame(channel, peer_stage, frame);
    for (const Tensor& tensor : payload) {
      if (tensor.buffer->bytes() > 0) send(channel, peer_stage, tensor.buffer);
    }
  }

  /// When the device does what the calling queue has sent, or received, since the last call; null: it knows no better
  /// than whoever made the calls.
  virtual std::shared_ptr<LaterInterval> take_times(Channel, bool /*sends*/) { return nullptr; }

  /// Whether send_message would now copy a message that fits into its frame into the system's buffers and return
  /// without waiting for the receiver: the executor's thread then sends it itself instead of waking the queue.
  virtual bool sends_at_once(Channel, int /*peer_stage*/) const { return false; }

  /// All blocked and later calls throw AbortedError(reason). Idempotent, the first reason stays.
  virtual void abort(const std::string& reason) = 0;
};

}  // namespace fold3d::comm
