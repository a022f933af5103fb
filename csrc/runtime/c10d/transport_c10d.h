// comm::Transport over torch.distributed process groups.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "comm/arbiter/message_watch.h"
#include "comm/p2p/transport.h"
#include "core/network/hosts.h"
#include "runtime/c10d/abortable_works.h"
#include "runtime/c10d/message_times.h"
#include "runtime/c10d/message_words.h"
#include "runtime/device/device.h"
#include "runtime/device/stream_clock.h"

namespace fold3d::runtime {

/// Names of the process groups of one rank, as given by `ProcessGroup.group_name`: by which each of its four queues
/// sends or receives. The group rank is the stage, but in groups of two it is the other one that is meant. Two queues
/// of a rank may share a group of host memory. Of device memory each has its own, of two ranks and one direction: a
/// library's communicator does one thing after the other, so whoever shared it could wait in a circle.
/// `against`: for the ways against the usual ones, forward to the stage before and backward to the next, of segments
/// that run back (core::Style::kV), in the order of the others; there are none with two stages, where both ways are the
/// same.
struct GroupNames {
  std::string send_forward, recv_forward, send_backward, recv_backward;
  std::array<std::string, 4> against = {};
};

/// Point-to-point calls on c10d groups (gloo for host memory, NCCL or the like for device memory). Threads: as
/// comm::Transport says.
///
/// On the CPU calls block until the transfer is complete or abort() ends them; the Communicator sets the deadlines. On
/// other devices it works by streams: each queue has one on which its transfers are launched. Of sends at most
/// `kSendsUnderWay` per queue are under way, whose buffers it holds. A receive waits for those who used the memory
/// before, and whoever uses it next waits for the receive; the host waits for neither.
class C10dTransport final : public comm::Transport {
 public:
  /// Resolves the groups by name; an empty name stands for a group that is not used. Throws c10::Error when one does
  /// not exist. `clock`: of the device.
  /// `watch`: hears of what is sent by stream to other hosts and received from them; null, on all ranks: nobody wants
  /// to know. `hosts`: of each stage; `stage`: this rank's, of `pp`.
  C10dTransport(const GroupNames& names, c10::Device device, std::shared_ptr<StreamClock> clock,
                std::unique_ptr<comm::MessageWatch> watch = nullptr, core::Hosts hosts = {}, int stage = 0, int pp = 1);
  ~C10dTransport() override;

  void end() override;
  bool works_by_stream() const override { return !device_.is_cpu(); }
  void send(comm::Channel channel, int peer_stage, std::shared_ptr<comm::Buffer> buffer) override;
  void recv(comm::Channel channel, int peer_stage, std::shared_ptr<comm::Buffer> buffer) override;
  void send_frame(comm::Channel channel, int peer_stage, std::span<const std::byte> frame) override;
  void recv_frame(comm::Channel channel, int peer_stage, std::span<std::byte> frame) override;
  std::shared_ptr<comm::LaterInterval> take_times(comm::Channel channel, bool sends) override;
  void abort(const std::string& reason) override;

 private:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  static constexpr std::size_t kSendsUnderWay = 4;

  struct Transfer {
    std::shared_ptr<comm::Buffer> buffer;  // of a send
    std::shared_ptr<DeviceEvent> done = std::make_shared<DeviceEvent>();
  };

  struct Line {
    Group group;
    c10::Stream stream;
    std::shared_ptr<LinkRate> rate;       // shared with the queue of the other direction
    std::deque<Transfer> under_way = {};  // sends, and of receives the last; the queue's during a step
    // Of the message under way; the queue's.
    std::optional<comm::Moment> begun = std::nullopt, ended = std::nullopt;
    std::size_t bytes = 0;
    std::unique_ptr<MessageWords> words = nullptr;  // with another host, once there was one

    int peer(int stage) const { return group->getSize() == 2 ? 1 - group->getRank() : stage; }
  };

  Line& line(comm::Channel channel, bool sends, bool against) {
    return lines_[(channel == comm::Channel::kForward ? 0 : 2) + (sends ? 0 : 1) + (against ? 4 : 0)];
  }
  Line& sends(comm::Channel channel, int peer_stage) {
    return line(channel, true, is_against(channel == comm::Channel::kForward, peer_stage));
  }
  Line& receives(comm::Channel channel, int peer_stage) {
    return line(channel, false, is_against(channel == comm::Channel::kBackward, peer_stage));
  }
  /// Whether a message to or from a peer goes against its channel's usual way, by which the peer is the next stage if
  /// `next`, else the stage before.
  bool is_against(bool next, int peer_stage) const {
    return pp_ > 2 && peer_stage != (stage_ + (next ? 1 : pp_ - 1)) % pp_;
  }
  c10::intrusive_ptr<c10d::Work> begin_send(Line& line, int peer_stage, const at::Tensor& tensor);
  c10::intrusive_ptr<c10d::Work> begin_recv(Line& line, int peer_stage, const at::Tensor& tensor);
  void make_room(Line& line);
  void begins(Line& line);
  void ends(Line& line, std::size_t bytes);
  bool is_watched(int peer_stage) const { return watch_ && core::uses_card(hosts_, stage_, peer_stage); }
  void watch_send(comm::Channel channel, int peer_stage, const Transfer& transfer);
  void watch_recv(comm::Channel channel, int peer_stage, std::size_t bytes, std::shared_ptr<DeviceEvent> done);

  const c10::Device device_;
  const std::shared_ptr<StreamClock> clock_;
  const core::Hosts hosts_;
  const int stage_;
  const int pp_;
  std::array<Line, 8> lines_;  // of each queue; then against the usual ways
  AbortableWorks works_;
  const std::unique_ptr<comm::MessageWatch> watch_;  // last: its thread uses the lines' words
};

}  // namespace fold3d::runtime
