#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "simdevice/c10d/gloo_calls.h"
#include "simdevice/core/runtime.h"

namespace simdevice {

/// How fast collectives and messages of all groups move from now on, in bytes per second of what a rank sends, or
/// receives if that is more; 0: as fast as gloo.
void set_network(double bytes_per_second);

/// A process group of the simulated device by NCCL's rules: work runs on a stream of the communicator, after what the
/// current stream has queued; one communicator for the group's collectives and batches, one for each pair of ranks for
/// messages by themselves, in both directions and in the order of their launches; a send ends when the receiver has the
/// message. With a device bound to the group (init_process_group's device_id) single messages share the group's
/// communicator. Ranks that launch in different orders hang until gloo's timeout, which the host's next wait raises.
/// As NCCL, for one launching thread at a time.
class SimBackend final : public c10d::Backend {
 public:
  SimBackend(BackendPtr gloo, int rank, int size);

  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return launched_; }
  void abort() override { calls_->abort(); }
  void shutdown() override;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                        std::vector<std::int64_t>& input_sizes, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  /// One operation of a batch. begin() starts it and returns what end() waits for; all begin before the first ends.
  struct Part {
    std::string name;
    c10d::OpType type;
    Tensors reads, writes;
    std::function<WorkPtr(GlooCalls&)> begin;
    std::function<void(GlooCalls&, const WorkPtr&)> end;
  };

  static Part collective(std::string name, c10d::OpType type, Tensors reads, Tensors writes,
                         std::function<WorkPtr(c10d::Backend&)> call);
  Part gather_part(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) const;
  Part scatter_part(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) const;
  static Part message(std::string name, c10d::OpType type, Tensors reads, Tensors writes,
                      std::function<WorkPtr(c10d::Backend&)> call);
  int communicator_with(int peer) const;
  WorkPtr add(int communicator, Part part);
  WorkPtr launch(int communicator, std::vector<Part> parts, bool is_barrier = false);
  Stream* stream_of_communicator(int device, int communicator);

  static constexpr int kGroup = -1;  // the communicator of the group; else that with a peer

  const std::shared_ptr<GlooCalls> calls_;
  std::map<std::pair<int, int>, Stream*> streams_;  // of each device and communicator
  bool is_batch_ = false;
  std::vector<Part> batch_;
  std::uint64_t launched_ = 0;
};

}  // namespace simdevice
