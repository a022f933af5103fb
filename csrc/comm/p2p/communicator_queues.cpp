// What the queues of a Communicator do; each function here runs on a queue's thread.
#include <cstring>
#include <span>
#include <utility>

#include "comm/base/clock.h"
#include "comm/base/errors.h"
#include "comm/p2p/communicator.h"
#include "comm/p2p/frame.h"
#include "comm/p2p/message_routing.h"
#include "core/ir/deps.h"

namespace fold3d::comm {
namespace {

std::string name_of(const core::Action& action, std::uint32_t step) {
  return core::to_string(action) + " of step " + std::to_string(step);
}

void copy_inline(std::span<const std::byte> payload, const Tensors& tensors) {
  for (const Tensor& tensor : tensors) {
    const std::size_t bytes = tensor.buffer->bytes();
    if (bytes == 0) continue;
    std::byte* const to = tensor.buffer->host_data();
    if (to == nullptr) {
      throw ProtocolError(
          "a message from host memory arrived at a rank whose memory is on a device; all ranks of a pipeline "
          "must use the same kind of device");
    }
    std::memcpy(to, payload.data(), bytes);
    payload = payload.subspan(bytes);
  }
}

}  // namespace

void Communicator::run(QueueId id, std::size_t index) noexcept {
  Line& own = line(id);
  Task& task = own.tasks[index];
  const auto failed = [&](Failure::Kind kind, const std::string& cause) {
    fail(kind, name_ + ": " + describe(task.action) + " failed: " + cause);
  };
  try {
    switch (id) {
      case QueueId::kSendForward:
      case QueueId::kSendBackward:
        return run_send(own, id, task);
      case QueueId::kRecvForward:
      case QueueId::kRecvBackward:
        return run_recv(own, id, task);
    }
  } catch (const ProtocolError& error) {
    failed(Failure::Kind::kProtocol, error.what());
  } catch (const TimeoutError& error) {
    failed(Failure::Kind::kTimeout, error.what());
  } catch (const AbortedError& error) {
    failed(Failure::Kind::kAborted, error.what());
  } catch (const std::exception& error) {
    failed(Failure::Kind::kError, error.what());
  } catch (...) {
    failed(Failure::Kind::kError, "an exception that is no std::exception");
  }
}

void Communicator::run_send(Line& own, QueueId id, Task& task) {
  const std::int64_t start_ns = now_ns();
  if (is_announced(task.action)) arbiter_->hold_message(NicArbiter::Direction::kSend);
  const bool is_inline = write_frame(own.frame, task.action, step_, task.tensors);
  const std::span<const Tensor> all(task.tensors);
  transport_->send_message(channel_of(id), peer_of(task.action), own.frame, is_inline ? all.first(0) : all);
  own.log.append({.action = task.action,
                  .queue = id,
                  .start_ns = start_ns,
                  .end_ns = now_ns(),
                  .bytes = payload_bytes(task.tensors)},
                 transport_->take_times(channel_of(id), /*sends=*/true));
  task.tensors.clear();
  if (is_announced(task.action)) arbiter_->message_ends(NicArbiter::Direction::kSend);
}

Tensors Communicator::memory_for(const Task& task, const std::vector<TensorDesc>& descs) {
  for (const TensorDesc& desc : descs) allocator_->check(desc);
  if (task.lands) return landing_->take(task.action, descs);
  Tensors tensors;
  tensors.reserve(descs.size());
  for (const TensorDesc& desc : descs) tensors.push_back({.desc = desc, .buffer = pool_.acquire(desc)});
  return tensors;
}

void Communicator::run_recv(Line& own, QueueId id, Task& task) {
  const Channel channel = channel_of(id);
  const core::Action expected = core::other_end(task.action);
  const int peer = peer_of(task.action);
  transport_->recv_frame(channel, peer, own.frame);
  const std::int64_t start_ns = now_ns();
  const Header header = read_frame(own.frame);
  if (header.send != expected || header.step != step_) {
    throw ProtocolError("the schedule asks for " + name_of(expected, step_) + ", but " +
                        name_of(header.send, header.step) + " arrived; the ranks do not run the same schedule");
  }
  Tensors tensors = memory_for(task, header.tensors);
  if (header.is_inline) {
    copy_inline(header.payload, tensors);
  } else {
    const bool announced = is_announced(task.action);
    // Only now: a frame that has not arrived says nothing about when its payload wants the card.
    if (announced) arbiter_->message_begins(NicArbiter::Direction::kReceive, payload_bytes(tensors));
    if (announced) arbiter_->hold_message(NicArbiter::Direction::kReceive);
    for (const Tensor& tensor : tensors) {
      if (tensor.buffer->bytes() > 0) transport_->recv(channel, peer, tensor.buffer);
    }
    if (announced) arbiter_->message_ends(NicArbiter::Direction::kReceive);
  }
  own.log.append(
      {.action = task.action, .queue = id, .start_ns = start_ns, .end_ns = now_ns(), .bytes = payload_bytes(tensors)},
      transport_->take_times(channel, /*sends=*/false));
  if (task.lands) landing_->filled(task.action, tensors);
  task.tensors = std::move(tensors);
}

}  // namespace fold3d::comm
