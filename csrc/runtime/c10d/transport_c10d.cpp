#include "runtime/c10d/transport_c10d.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <vector>

#include "runtime/c10d/bytes_view.h"
#include "runtime/device/tensor_buffer.h"

namespace fold3d::runtime {

namespace {

constexpr int kTag = 0;  // one sender and one receiver per channel: order alone pairs the messages

TensorBuffer& as_tensor(const std::shared_ptr<comm::Buffer>& buffer) { return static_cast<TensorBuffer&>(*buffer); }

}  // namespace

C10dTransport::C10dTransport(const GroupNames& names, int stage, int num_stages, c10::Device device)
    : stage_(stage), num_stages_(num_stages), device_(device), compute_stream_(current_stream(device)) {
  if (!names.forward.empty()) {
    forward_ = c10d::resolve_process_group(names.forward);
    forward_wrap_ = c10d::resolve_process_group(names.forward_wrap);
    backward_ = c10d::resolve_process_group(names.backward);
    backward_wrap_ = c10d::resolve_process_group(names.backward_wrap);
  }
}

C10dTransport::~C10dTransport() = default;

bool C10dTransport::sends_over_wrap(comm::Channel channel) const {
  return channel == comm::Channel::kForward ? stage_ == num_stages_ - 1 : stage_ == 0;
}

bool C10dTransport::receives_over_wrap(comm::Channel channel) const {
  return channel == comm::Channel::kForward ? stage_ == 0 : stage_ == num_stages_ - 1;
}

c10d::ProcessGroup& C10dTransport::group(comm::Channel channel, bool wrap) const {
  if (channel == comm::Channel::kForward) return wrap ? *forward_wrap_ : *forward_;
  return wrap ? *backward_wrap_ : *backward_;
}

void C10dTransport::transfer(comm::Channel channel, bool is_send, int peer_stage, const at::Tensor& tensor) {
  works_.check();
  auto& pg = group(channel, is_send ? sends_over_wrap(channel) : receives_over_wrap(channel));
  std::vector<at::Tensor> tensors{tensor};
  works_.wait(is_send ? pg.send(tensors, peer_stage, kTag) : pg.recv(tensors, peer_stage, kTag));
}

void C10dTransport::begin() { compute_stream_ = current_stream(device_); }

void C10dTransport::send(comm::Channel channel, int peer_stage, std::shared_ptr<comm::Buffer> buffer) {
  const c10::Stream stream = side_stream(device_, /*high_priority=*/true);
  const c10::StreamGuard guard(stream);
  as_tensor(buffer).ready().block(stream);
  transfer(channel, /*is_send=*/true, peer_stage, as_tensor(buffer).tensor());
}

void C10dTransport::recv(comm::Channel channel, int peer_stage, std::shared_ptr<comm::Buffer> buffer) {
  const c10::Stream stream = side_stream(device_, /*high_priority=*/true);
  const c10::StreamGuard guard(stream);
  // Pooled memory may still be read by kernels queued before it was given back: receive behind them.
  DeviceEvent reusable;
  reusable.record(compute_stream_);
  reusable.block(stream);
  const at::Tensor& target = as_tensor(buffer).tensor();
  if (target.device() == device_) return transfer(channel, /*is_send=*/false, peer_stage, target);
  // It lands in host memory: NCCL brings it as far as the device.
  const at::Tensor staging = at::empty(target.sizes(), target.options().device(device_));
  transfer(channel, /*is_send=*/false, peer_stage, staging);
  const c10::NoGradGuard no_grad;
  at::Tensor(target).copy_(staging, /*non_blocking=*/true);
  DeviceEvent done;
  done.record(stream);
  done.synchronize();
}

void C10dTransport::send_frame(comm::Channel channel, int peer_stage, std::span<const std::byte> frame) {
  transfer(channel, /*is_send=*/true, peer_stage, bytes_view(frame.data(), frame.size()));
}

void C10dTransport::recv_frame(comm::Channel channel, int peer_stage, std::span<std::byte> frame) {
  transfer(channel, /*is_send=*/false, peer_stage, bytes_view(frame.data(), frame.size()));
}

void C10dTransport::abort(const std::string& reason) { works_.abort(reason); }

}  // namespace fold3d::runtime
