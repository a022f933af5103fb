// comm::RingConnection over a torch.distributed process group.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>

#include "comm/ring/ring_connection.h"
#include "runtime/c10d/abortable_works.h"

namespace fold3d::runtime {

/// Sends and receives of one gloo group, in host memory: what rings use where no connections of their own are wanted.
/// Nobody else may send or receive on the group.
class C10dRingConnection final : public comm::RingConnection {
 public:
  /// Resolves the group by name; its ranks are the replicas of the stage. Throws c10::Error when it does not exist,
  /// std::invalid_argument when this process is not replica `rank` of `size` in it.
  C10dRingConnection(const std::string& group, int rank, int size);

  void send(std::span<const std::byte> header, std::span<const std::byte> payload) override;
  void recv(std::span<std::byte> bytes) override;
  void abort(const std::string& reason) noexcept override;

 private:
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const int next_, previous_;
  AbortableWorks works_;
};

}  // namespace fold3d::runtime
