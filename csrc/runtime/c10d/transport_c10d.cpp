#include "runtime/c10d/transport_c10d.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <exception>
#include <utility>
#include <vector>

#include "runtime/c10d/bytes_view.h"
#include "runtime/device/tensor_buffer.h"

namespace fold3d::runtime {

namespace {

constexpr int kFrameTag = 0;  // one sender and one receiver per queue: order alone pairs the messages

TensorBuffer& as_tensor(const std::shared_ptr<comm::Buffer>& buffer) { return static_cast<TensorBuffer&>(*buffer); }

}  // namespace

C10dTransport::C10dTransport(const GroupNames& names, c10::Device device, std::shared_ptr<StreamClock> clock,
                             std::unique_ptr<comm::MessageWatch> watch, core::Hosts hosts, int stage, int pp)
    : device_(device),
      clock_(std::move(clock)),
      hosts_(std::move(hosts)),
      stage_(stage),
      pp_(pp),
      lines_([&] {
        const auto line = [&](const std::string& name, const std::shared_ptr<LinkRate>& rate) {
          return Line{.group = name.empty() ? Group() : c10d::resolve_process_group(name),
                      .stream = side_stream(device, /*high_priority=*/true),
                      .rate = rate};
        };
        const auto next = std::make_shared<LinkRate>(), previous = std::make_shared<LinkRate>();
        return std::array<Line, 8>{line(names.send_forward, next),      line(names.recv_forward, previous),
                                   line(names.send_backward, previous), line(names.recv_backward, next),
                                   line(names.against[0], previous),    line(names.against[1], next),
                                   line(names.against[2], next),        line(names.against[3], previous)};
      }()),
      watch_(std::move(watch)) {}

C10dTransport::~C10dTransport() = default;

c10::intrusive_ptr<c10d::Work> C10dTransport::begin_send(Line& line, int peer_stage, const at::Tensor& tensor) {
  works_.check();
  std::vector<at::Tensor> tensors{tensor};
  return line.group->send(tensors, line.peer(peer_stage), kFrameTag);
}

c10::intrusive_ptr<c10d::Work> C10dTransport::begin_recv(Line& line, int peer_stage, const at::Tensor& tensor) {
  works_.check();
  std::vector<at::Tensor> tensors{tensor};
  return line.group->recv(tensors, line.peer(peer_stage), kFrameTag);
}

void C10dTransport::make_room(Line& line) {
  while (!line.under_way.empty() && (line.under_way.size() >= kSendsUnderWay || line.under_way.front().done->query())) {
    line.under_way.front().done->synchronize();
    line.under_way.pop_front();
  }
}

void C10dTransport::begins(Line& line) {
  if (clock_->is_of_device() && !line.begun) line.begun = clock_->now(line.stream);
}

void C10dTransport::ends(Line& line, std::size_t bytes) {
  if (!clock_->is_of_device()) return;
  line.ended = clock_->now(line.stream);
  line.bytes += bytes;
}

std::shared_ptr<comm::LaterInterval> C10dTransport::take_times(comm::Channel channel, bool sends) {
  Line& usual = line(channel, sends, /*against=*/false);
  Line& line = usual.begun && usual.ended ? usual : this->line(channel, sends, /*against=*/true);
  if (!line.begun || !line.ended) return nullptr;
  auto begun = *std::exchange(line.begun, std::nullopt), ended = *std::exchange(line.ended, std::nullopt);
  const std::size_t bytes = std::exchange(line.bytes, 0);
  if (sends) return std::make_shared<SendTimes>(std::move(begun), std::move(ended), bytes, line.rate);
  return std::make_shared<ReceiveTimes>(std::move(begun), std::move(ended), bytes, line.rate);
}

void C10dTransport::send(comm::Channel channel, int peer_stage, std::shared_ptr<comm::Buffer> buffer) {
  Line& line = sends(channel, peer_stage);
  TensorBuffer& source = as_tensor(buffer);
  if (device_.is_cpu()) return works_.wait(begin_send(line, peer_stage, source.tensor()));
  make_room(line);
  const c10::StreamGuard guard(line.stream);
  source.ready().block(line.stream);
  begins(line);
  begin_send(line, peer_stage, source.tensor())->wait();
  ends(line, source.bytes());
  line.under_way.push_back({.buffer = std::move(buffer)});
  line.under_way.back().done->record(line.stream);
  if (is_watched(peer_stage)) watch_send(channel, peer_stage, line.under_way.back());
}

/// The host is ahead of the device: the cards, this one and the receiver's, are wanted from when the data is there.
void C10dTransport::watch_send(comm::Channel channel, int peer_stage, const Transfer& transfer) {
  Line& line = sends(channel, peer_stage);
  if (!line.words) line.words = std::make_unique<MessageWords>(line.group, /*sends=*/true);
  watch_->push(channel == comm::Channel::kForward ? 0 : 1,
               {.direction = comm::NicArbiter::Direction::kSend,
                .bytes = transfer.buffer->bytes(),
                .is_ready = [buffer = transfer.buffer] { return as_tensor(buffer).ready().query(); },
                .is_through = [done = transfer.done] { return done->query(); },
                .when_ready = [words = line.words.get(), peer = line.peer(peer_stage)] { words->push(peer); }});
}

/// The device waits for its sender in the kernel that receives, and does not say when that has come.
void C10dTransport::watch_recv(comm::Channel channel, int peer_stage, std::size_t bytes,
                               std::shared_ptr<DeviceEvent> done) {
  Line& line = receives(channel, peer_stage);
  if (!line.words) line.words = std::make_unique<MessageWords>(line.group, /*sends=*/false);
  watch_->push(channel == comm::Channel::kForward ? 2 : 3,
               {.direction = comm::NicArbiter::Direction::kReceive,
                .bytes = bytes,
                .is_ready = [word = line.words->push(line.peer(peer_stage))] { return word->load(); },
                .is_through = [done = std::move(done)] { return done->query(); }});
}

void C10dTransport::recv(comm::Channel channel, int peer_stage, std::shared_ptr<comm::Buffer> buffer) {
  Line& line = receives(channel, peer_stage);
  TensorBuffer& target = as_tensor(buffer);
  if (device_.is_cpu()) return works_.wait(begin_recv(line, peer_stage, target.tensor()));
  const c10::StreamGuard guard(line.stream);
  if (target.tensor().device() == device_) {
    target.overwrite_on(line.stream);
    begins(line);
    begin_recv(line, peer_stage, target.tensor())->wait();
    ends(line, target.bytes());
    target.ready().record(line.stream);
    line.under_way.clear();
    line.under_way.emplace_back().done->record(line.stream);
    if (is_watched(peer_stage)) watch_recv(channel, peer_stage, target.bytes(), line.under_way.back().done);
    return;
  }
  // It lands in host memory: the library brings it as far as the device.
  const at::Tensor staging = at::empty(target.tensor().sizes(), target.tensor().options().device(device_));
  begins(line);
  begin_recv(line, peer_stage, staging)->wait();
  ends(line, target.bytes());
  const c10::NoGradGuard no_grad;
  at::Tensor(target.tensor()).copy_(staging, /*non_blocking=*/true);
  const auto done = std::make_shared<DeviceEvent>();
  done->record(line.stream);
  if (is_watched(peer_stage)) watch_recv(channel, peer_stage, target.bytes(), done);
  done->synchronize();
  works_.check();  // what was aborted ends, too, with anything in its memory
}

void C10dTransport::end() {
  if (device_.is_cpu()) return;
  const c10::Stream compute = current_stream(device_);
  for (Line& line : lines_) {
    for (const Transfer& transfer : line.under_way) transfer.done->block(compute);
    line.under_way.clear();
  }
}

void C10dTransport::send_frame(comm::Channel channel, int peer_stage, std::span<const std::byte> frame) {
  works_.wait(begin_send(sends(channel, peer_stage), peer_stage, bytes_view(frame.data(), frame.size())));
}

void C10dTransport::recv_frame(comm::Channel channel, int peer_stage, std::span<std::byte> frame) {
  works_.wait(begin_recv(receives(channel, peer_stage), peer_stage, bytes_view(frame.data(), frame.size())));
}

void C10dTransport::abort(const std::string& reason) {
  works_.abort(reason);
  if (device_.is_cpu()) return;
  for (const Line& line : lines_) {
    if (!line.group) continue;
    try {
      line.group->abort();  // ends the library's kernels, which may wait for a rank that is gone
    } catch (const std::exception&) {
      // the library has ended them already, or cannot: its own time limit ends them then
    }
  }
}

}  // namespace fold3d::runtime
