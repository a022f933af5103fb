// comm::Transport over torch.distributed process groups.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <string>

#include "comm/p2p/transport.h"
#include "runtime/c10d/abortable_works.h"
#include "runtime/device/device.h"

namespace fold3d::runtime {

/// Names of the process groups of one rank, as given by `ProcessGroup.group_name`. In the pipeline groups the group
/// rank is the stage. The wrap groups carry the connection between the last and the first stage: with two stages it
/// joins the same pair as the inner connection, and a communicator of its own keeps the two directions from waiting for
/// each other.
struct GroupNames {
  std::string forward, forward_wrap, backward, backward_wrap;
};

/// Blocking point-to-point calls on c10d groups (gloo for host memory, NCCL for CUDA memory).
///
/// Calls block until the transfer is complete or abort() ends them; the Communicator sets the deadlines. Threads: as
/// comm::Transport says.
class C10dTransport final : public comm::Transport {
 public:
  /// Resolves the groups by name; an empty name stands for a group that is not used. Throws c10::Error when one does
  /// not exist.
  C10dTransport(const GroupNames& names, int stage, int num_stages, c10::Device device);
  ~C10dTransport() override;

  void begin() override;
  void send(comm::Channel channel, int peer_stage, std::shared_ptr<comm::Buffer> buffer) override;
  void recv(comm::Channel channel, int peer_stage, std::shared_ptr<comm::Buffer> buffer) override;
  void send_frame(comm::Channel channel, int peer_stage, std::span<const std::byte> frame) override;
  void recv_frame(comm::Channel channel, int peer_stage, std::span<std::byte> frame) override;
  void abort(const std::string& reason) override;

 private:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  c10d::ProcessGroup& group(comm::Channel channel, bool wrap) const;
  bool sends_over_wrap(comm::Channel channel) const;
  bool receives_over_wrap(comm::Channel channel) const;
  void transfer(comm::Channel channel, bool is_send, int peer_stage, const at::Tensor& tensor);

  Group forward_, forward_wrap_, backward_, backward_wrap_;
  int stage_;
  int num_stages_;
  c10::Device device_;
  c10::Stream compute_stream_;  // of the thread that computes, in this step: where tensors are produced and used
  AbortableWorks works_;
};

}  // namespace fold3d::runtime
