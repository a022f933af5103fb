#include "simdevice/c10d/sim_backend.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <utility>

#include "simdevice/c10d/sim_work.h"
#include "simdevice/device/current.h"
#include "simdevice/device/tensors.h"

namespace simdevice {

using c10d::OpType;

namespace {

std::atomic<double> network{0};

/// For how long what a rank sends or receives is on its way, by the way that sends least.
std::chrono::nanoseconds travels(OpType type, const Tensors& reads, const Tensors& writes, int size) {
  const double speed = network;
  if (speed <= 0) return {};
  const auto bytes_of = [](const Tensors& tensors) {
    std::size_t bytes = 0;
    for (const at::Tensor& tensor : tensors) bytes += tensor.nbytes();
    return static_cast<double>(bytes);
  };
  double bytes = std::max(bytes_of(reads), bytes_of(writes));
  if (type != OpType::SEND && type != OpType::RECV) bytes *= static_cast<double>(size - 1) / size;
  if (type == OpType::ALLREDUCE) bytes *= 2;
  return std::chrono::nanoseconds(static_cast<std::int64_t>(bytes / speed * 1e9));
}

/// gloo's, of all messages. It sends none before the receiver asks for it, so a send ends when the receiver has it.
constexpr int kTag = 1;

Tensors aliases(const Tensors& tensors) {
  Tensors out;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.is_privateuseone(), "simccl takes tensors on the simulated device, not on ", tensor.device());
    out.push_back(host_alias(tensor));
  }
  return out;
}

void check_sum(const c10d::ReduceOp& op) {
  TORCH_CHECK(op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG, "simccl knows sums and means alone");
}

at::Tensor memory_of(const at::Tensor& tensor) { return aliases({tensor}).front(); }

/// Adds what the ranks have, in their order.
void store_sum(const at::Tensor& to, const Tensors& parts, bool is_mean) {
  at::Tensor sum = parts.front().clone();
  for (std::size_t rank = 1; rank < parts.size(); ++rank) sum.add_(parts[rank]);
  if (is_mean) sum.div_(static_cast<std::int64_t>(parts.size()));
  to.view({-1}).copy_(sum.view({-1}));
}

/// What a gather of `input` into `output` writes: as NCCL, nothing where the input lies where it belongs.
Tensors written_by_gather(const at::Tensor& output, const at::Tensor& input, int rank, int size) {
  const at::Tensor parts = output.view({size, -1});
  if (parts[rank].data_ptr() != input.data_ptr()) return {output};
  Tensors written;
  if (rank > 0) written.push_back(parts.narrow(0, 0, rank));
  if (rank + 1 < size) written.push_back(parts.narrow(0, rank + 1, size - rank - 1));
  return written;
}

}  // namespace

void set_network(double bytes_per_second) { network = bytes_per_second; }

SimBackend::SimBackend(BackendPtr gloo, int rank, int size)
    : c10d::Backend(rank, size), calls_(std::make_shared<GlooCalls>(std::move(gloo))) {}

void SimBackend::shutdown() {
  for (const auto& [key, stream] : streams_) stream->wait_until_idle();
}

Stream* SimBackend::stream_of_communicator(int device, int communicator) {
  Stream*& stream = streams_[{device, communicator}];
  if (stream == nullptr) stream = runtime().new_stream(device, 0);
  return stream;
}

void SimBackend::startCoalescing() {
  is_batch_ = true;
  batch_.clear();
}

WorkPtr SimBackend::endCoalescing() {
  is_batch_ = false;
  return launch(kGroup, std::exchange(batch_, {}));
}

WorkPtr SimBackend::add(int communicator, Part part) {
  if (is_batch_) {
    batch_.push_back(std::move(part));
    return nullptr;  // the batch's own is that of endCoalescing()
  }
  std::vector<Part> parts;
  parts.push_back(std::move(part));
  return launch(communicator, std::move(parts));
}

WorkPtr SimBackend::launch(int communicator, std::vector<Part> parts, bool is_barrier) {
  ++launched_;
  int device = current_device();
  std::vector<Access> accesses;
  Tensors kept, results;
  std::string names;
  for (const Part& part : parts) {
    for (const at::Tensor& tensor : part.reads) add_access(accesses, tensor, false);
    for (const at::Tensor& tensor : part.writes) add_access(accesses, tensor, true);
    kept.insert(kept.end(), part.reads.begin(), part.reads.end());
    kept.insert(kept.end(), part.writes.begin(), part.writes.end());
    results.insert(results.end(), part.writes.begin(), part.writes.end());
    if (!names.empty()) names += " + ";
    names += part.name;
  }
  if (!kept.empty()) device = kept.front().device().index();
  const OpType type = parts.size() == 1 ? parts.front().type : OpType::COALESCED;
  Stream* const stream = stream_of_communicator(device, communicator);
  runtime().wait(stream, runtime().record(current_stream(device)));
  std::string what = "simccl " + names + " (number " + std::to_string(launched_) + " of rank " +
                     std::to_string(getRank()) + " of " + std::to_string(getSize()) + ")";
  const int size = getSize();
  launch_kernel(stream, what, accesses, [what, stream, size, parts = std::move(parts), calls = calls_] {
    try {
      std::vector<WorkPtr> begun;
      for (const Part& part : parts) begun.push_back(part.begin(*calls));
      for (std::size_t i = 0; i < parts.size(); ++i) parts[i].end(*calls, begun[i]);
      std::chrono::nanoseconds time{};  // from when all are there
      for (const Part& part : parts) time += travels(part.type, part.reads, part.writes, size);
      if (time.count() > 0) stream->occupy_until(std::chrono::steady_clock::now() + time);
    } catch (const std::exception& error) {
      if (calls->is_aborted()) return;  // as NCCL's kernels, which then end with anything in their memory
      const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
      throw KernelError(what + " did not end: " + (of_torch ? of_torch->what_without_backtrace() : error.what()) +
                        "\nif this was the timeout, a rank is gone, or ranks launched in different orders");
    }
  });
  return c10::make_intrusive<SimWork>(getRank(), type, stream, runtime().record(stream), std::move(kept), results,
                                      is_barrier);
}

SimBackend::Part SimBackend::collective(std::string name, OpType type, Tensors reads, Tensors writes,
                                        std::function<WorkPtr(c10d::Backend&)> call) {
  return {std::move(name),
          type,
          std::move(reads),
          std::move(writes),
          [call = std::move(call)](GlooCalls& calls) { return calls.start(call); },
          [](GlooCalls& calls, const WorkPtr& work) { calls.wait_for_collective(work); }};
}

WorkPtr SimBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const auto call = [on = aliases(tensors), options](c10d::Backend& gloo) mutable {
    return gloo.allreduce(on, options);
  };
  return add(kGroup, collective("all_reduce", OpType::ALLREDUCE, {}, tensors, call));
}

WorkPtr SimBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const auto call = [on = aliases(tensors), options](c10d::Backend& gloo) mutable {
    return gloo.broadcast(on, options);
  };
  const bool sends = options.rootRank == getRank();
  return add(kGroup, collective("broadcast", OpType::BROADCAST, sends ? tensors : Tensors{},
                                sends ? Tensors{} : tensors, call));
}

WorkPtr SimBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  TORCH_CHECK(tensors.size() == 1, "simccl reduces one tensor at a time");
  check_sum(options.reduceOp);
  // gloo's own writes the tensors of the others, too, which NCCL reads only; and so the root adds in the order of
  // ranks.
  const int root = static_cast<int>(options.rootRank), size = getSize();
  const bool is_root = root == getRank();
  auto received = std::make_shared<Tensors>();
  const auto call = [received, from = aliases(tensors), root, is_root, size](c10d::Backend& gloo) mutable {
    for (int rank = 0; is_root && rank < size; ++rank) received->push_back(at::empty_like(from.front()));
    c10d::GatherOptions to_root;
    to_root.rootRank = root;
    std::vector<Tensors> all;
    if (is_root) all.push_back(*received);
    return gloo.gather(all, from, to_root);
  };
  Part part = collective("reduce", OpType::REDUCE, is_root ? Tensors{} : tensors, is_root ? tensors : Tensors{}, call);
  const bool is_mean = options.reduceOp == c10d::ReduceOp::AVG;
  part.end = [received, to = memory_of(tensors.front()), is_mean](GlooCalls& calls, const WorkPtr& work) {
    calls.wait_for_collective(work);
    if (!received->empty()) store_sum(to, *received, is_mean);
    received->clear();
  };
  return add(kGroup, std::move(part));
}

WorkPtr SimBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  TORCH_CHECK(outputs.size() == 1, "simccl gathers one tensor of each rank at a time");
  const auto call = [to = std::vector<Tensors>{aliases(outputs[0])}, from = aliases(inputs),
                     options](c10d::Backend& gloo) mutable { return gloo.allgather(to, from, options); };
  return add(kGroup, collective("all_gather", OpType::ALLGATHER, inputs, outputs[0], call));
}

SimBackend::Part SimBackend::gather_part(at::Tensor& output, at::Tensor& input,
                                         const c10d::AllgatherOptions& options) const {
  // gloo itself writes the own part: with the bytes that are there already.
  const auto call = [to = memory_of(output), from = memory_of(input), options](c10d::Backend& gloo) mutable {
    return gloo._allgather_base(to, from, options);
  };
  return collective("all_gather_into_tensor", OpType::_ALLGATHER_BASE, {input},
                    written_by_gather(output, input, getRank(), getSize()), call);
}

SimBackend::Part SimBackend::scatter_part(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& options) const {
  check_sum(options.reduceOp);
  // gloo's own cannot be aborted; and so every rank adds in the order of the ranks.
  auto received = std::make_shared<at::Tensor>();
  const auto call = [received, from = memory_of(input)](c10d::Backend& gloo) mutable {
    *received = at::empty_like(from, at::MemoryFormat::Contiguous);
    std::vector<std::int64_t> even;
    return gloo.alltoall_base(*received, from, even, even, c10d::AllToAllOptions());
  };
  Part part = collective("reduce_scatter_tensor", OpType::_REDUCE_SCATTER_BASE, {input}, {output}, call);
  const bool is_mean = options.reduceOp == c10d::ReduceOp::AVG;
  part.end = [received, to = memory_of(output), is_mean, size = getSize()](GlooCalls& calls, const WorkPtr& work) {
    calls.wait_for_collective(work);
    store_sum(to, received->view({size, -1}).unbind(), is_mean);
    *received = at::Tensor();
  };
  return part;
}

WorkPtr SimBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return add(kGroup, gather_part(output, input, options));
}

WorkPtr SimBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::ReduceScatterOptions& options) {
  return add(kGroup, scatter_part(output, input, options));
}

WorkPtr SimBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  std::vector<Part> parts;
  for (std::size_t i = 0; i < outputs.size(); ++i) parts.push_back(gather_part(outputs[i], inputs[i], options));
  return launch(kGroup, std::move(parts));
}

WorkPtr SimBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::ReduceScatterOptions& options) {
  std::vector<Part> parts;
  for (std::size_t i = 0; i < outputs.size(); ++i) parts.push_back(scatter_part(outputs[i], inputs[i], options));
  return launch(kGroup, std::move(parts));
}

WorkPtr SimBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                                  std::vector<std::int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  const auto call = [to = memory_of(output), from = memory_of(input), output_sizes, input_sizes,
                     options](c10d::Backend& gloo) mutable {
    return gloo.alltoall_base(to, from, output_sizes, input_sizes, options);
  };
  return add(kGroup, collective("all_to_all", OpType::ALLTOALL_BASE, {input}, {output}, call));
}

// Messages match by their order, as NCCL's do, which knows no tags.

SimBackend::Part SimBackend::message(std::string name, OpType type, Tensors reads, Tensors writes,
                                     std::function<WorkPtr(c10d::Backend&)> call) {
  Part part = collective(std::move(name), type, std::move(reads), std::move(writes), std::move(call));
  part.end = [](GlooCalls& calls, const WorkPtr& work) { calls.wait_for_message(work); };
  return part;
}

int SimBackend::communicator_with(int peer) const { return getBoundDeviceId().has_value() ? kGroup : peer; }

WorkPtr SimBackend::send(Tensors& tensors, int peer, int) {
  const auto call = [on = aliases(tensors), peer](c10d::Backend& gloo) mutable { return gloo.send(on, peer, kTag); };
  return add(communicator_with(peer), message("send to " + std::to_string(peer), OpType::SEND, tensors, {}, call));
}

WorkPtr SimBackend::recv(Tensors& tensors, int peer, int) {
  const auto call = [on = aliases(tensors), peer](c10d::Backend& gloo) mutable { return gloo.recv(on, peer, kTag); };
  return add(communicator_with(peer), message("receive from " + std::to_string(peer), OpType::RECV, {}, tensors, call));
}

WorkPtr SimBackend::barrier(const c10d::BarrierOptions&) {
  std::vector<Part> parts;
  parts.push_back(collective("barrier", OpType::BARRIER, {}, {},
                             [](c10d::Backend& gloo) { return gloo.barrier(c10d::BarrierOptions()); }));
  return launch(kGroup, std::move(parts), true);
}

}  // namespace simdevice
