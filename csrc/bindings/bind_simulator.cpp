#include "bindings/bindings.h"

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/memory/memory_curve.h"
#include "core/memory/memory_model.h"
#include "core/sim/simulate.h"

namespace py = pybind11;

namespace fold3d::bindings {
namespace {

using core::BucketModel;
using core::ChunkBytes;
using core::ClusterModel;
using core::HeadBytes;
using core::MemoryModel;
using core::MemoryPoint;
using core::RankBreakdown;
using core::SimulatedSpan;
using core::StageMemory;
using core::TrainingStep;

/// The lane's name in timelines.
std::string lane_of_span(const SimulatedSpan& span) {
  switch (span.lane) {
    case SimulatedSpan::Lane::kCompute:
      return "compute";
    case SimulatedSpan::Lane::kSendForward:
      return "send_f";
    case SimulatedSpan::Lane::kSendBackward:
      return "send_b";
    case SimulatedSpan::Lane::kReduceScatter:
    case SimulatedSpan::Lane::kGather:
      return "reduce";
    case SimulatedSpan::Lane::kOffload:
      return "offload";
    case SimulatedSpan::Lane::kPrefetch:
      return "prefetch";
  }
  return "";
}

std::string text_of_span(const SimulatedSpan& span) {
  if (span.lane == SimulatedSpan::Lane::kGather) return std::to_string(span.action.chunk) + "GATHER";
  return core::to_string(span.action);
}

using BucketTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t, bool>;

std::vector<std::vector<BucketTuple>> buckets_of(const ClusterModel& model) {
  std::vector<std::vector<BucketTuple>> chunks;
  for (const auto& parts : model.buckets) {
    auto& chunk = chunks.emplace_back();
    for (const BucketModel& part : parts) chunk.emplace_back(part.forward_ns, part.backward_ns, part.bytes, part.zero1);
  }
  return chunks;
}

void set_buckets(ClusterModel& model, const std::vector<std::vector<BucketTuple>>& chunks) {
  model.buckets.clear();
  for (const auto& parts : chunks) {
    auto& chunk = model.buckets.emplace_back();
    for (const auto& [forward_ns, backward_ns, bytes, zero1] : parts) {
      chunk.push_back({forward_ns, backward_ns, bytes, zero1});
    }
  }
}

void bind_model(py::module_& module) {
  py::class_<ClusterModel>(module, "ClusterModel", "What a training step costs: computation, network, DP.sync.")
      .def(py::init<>())
      .def_readwrite("dp", &ClusterModel::dp)
      .def_readwrite("hosts", &ClusterModel::hosts)
      .def_readwrite("halves", &ClusterModel::halves)
      .def_readwrite("bandwidth", &ClusterModel::bandwidth)
      .def_readwrite("latency_ns", &ClusterModel::latency_ns)
      .def_readwrite("hop_latency_ns", &ClusterModel::hop_latency_ns)
      .def_readwrite("slice_bytes", &ClusterModel::slice_bytes)
      .def_readwrite("preempt", &ClusterModel::preempt)
      .def_property(
          "dp_sync", [](const ClusterModel& model) { return std::string(core::to_string(model.dp_sync)); },
          [](ClusterModel& model, const std::string& text) { model.dp_sync = core::parse_dp_sync(text); })
      .def_readwrite("gradient_delay", &ClusterModel::gradient_delay)
      .def_readwrite("early_gathers", &ClusterModel::early_gathers)
      .def_readwrite("gather_order", &ClusterModel::gather_order)
      .def_readwrite("layers_per_bucket", &ClusterModel::layers_per_bucket)
      .def_readwrite("bucket_ns", &ClusterModel::bucket_ns)
      .def_readwrite("action_ns", &ClusterModel::action_ns)
      .def_readwrite("update_ns", &ClusterModel::update_ns)
      .def_property("buckets", &buckets_of, &set_buckets)
      .def_readwrite("forward_ns", &ClusterModel::forward_ns)
      .def_readwrite("backward_ns", &ClusterModel::backward_ns)
      .def_readwrite("head_ns", &ClusterModel::head_ns)
      .def_readwrite("forward_tp_ns", &ClusterModel::forward_tp_ns)
      .def_readwrite("backward_tp_ns", &ClusterModel::backward_tp_ns)
      .def_readwrite("forward_links", &ClusterModel::forward_links)
      .def_readwrite("backward_links", &ClusterModel::backward_links)
      .def_readwrite("toll_ns", &ClusterModel::toll_ns)
      .def_readwrite("layers", &ClusterModel::layers)
      .def_readwrite("activation_bytes", &ClusterModel::activation_bytes)
      .def_readwrite("stash_bytes", &ClusterModel::stash_bytes)
      .def_readwrite("copy_bandwidth", &ClusterModel::copy_bandwidth)
      .def_readwrite("copies_share", &ClusterModel::copies_share)
      .def_readwrite("gradient_bytes", &ClusterModel::gradient_bytes);
}

void bind_step(py::module_& module) {
  py::class_<RankBreakdown>(module, "RankBreakdown", "Where a simulated rank's step goes.")
      .def_readonly("compute_ns", &RankBreakdown::compute_ns)
      .def_readonly("exposed_tp_ns", &RankBreakdown::exposed_tp_ns)
      .def_readonly("bubble_ns", &RankBreakdown::bubble_ns)
      .def_readonly("exposed_pp_ns", &RankBreakdown::exposed_pp_ns)
      .def_readonly("exposed_dp_ns", &RankBreakdown::exposed_dp_ns)
      .def_readonly("exposed_offload_ns", &RankBreakdown::exposed_offload_ns)
      .def_readonly("hidden_dp_ns", &RankBreakdown::hidden_dp_ns)
      .def_readonly("pp_bytes", &RankBreakdown::pp_bytes)
      .def_readonly("dp_bytes", &RankBreakdown::dp_bytes);
  py::class_<SimulatedSpan>(module, "SimulatedSpan", "One thing that a rank does in the simulated step.")
      .def_readonly("rank", &SimulatedSpan::rank)
      .def_property_readonly("lane", &lane_of_span)
      .def_property_readonly("text", &text_of_span)
      .def_readonly("start_ns", &SimulatedSpan::start_ns)
      .def_readonly("end_ns", &SimulatedSpan::end_ns)
      .def_readonly("bytes", &SimulatedSpan::bytes);
  py::class_<TrainingStep>(module, "TrainingStep", "A simulated step in steady state.")
      .def_readonly("step_ns", &TrainingStep::step_ns)
      .def_readonly("steps", &TrainingStep::steps)
      .def_readonly("steady", &TrainingStep::steady)
      .def_readonly("limit_ns", &TrainingStep::limit_ns)
      .def_readonly("ranks", &TrainingStep::ranks)
      .def_readonly("gather_order", &TrainingStep::gather_order)
      .def_readonly("early_gathers", &TrainingStep::early_gathers)
      .def_readonly("preemptions", &TrainingStep::preemptions)
      .def_readonly("longest_message_wait_ns", &TrainingStep::longest_message_wait_ns)
      .def_readonly("spans", &TrainingStep::spans);
}

void bind_memory(py::module_& module) {
  py::class_<ChunkBytes>(module, "ChunkBytes", "What a chunk needs, in bytes; immutable.")
      .def(py::init([](std::int64_t weights, std::int64_t gradients, std::int64_t optimizer, std::int64_t inputs,
                       std::int64_t saved, std::int64_t kept, std::int64_t forward, std::int64_t backward) {
             return ChunkBytes{weights, gradients, optimizer, inputs, saved, kept, forward, backward};
           }),
           py::kw_only(), py::arg("weights") = 0, py::arg("gradients") = 0, py::arg("optimizer") = 0,
           py::arg("inputs") = 0, py::arg("saved") = 0, py::arg("kept") = 0, py::arg("forward") = 0,
           py::arg("backward") = 0)
      .def_readonly("weights", &ChunkBytes::weights)
      .def_readonly("gradients", &ChunkBytes::gradients)
      .def_readonly("optimizer", &ChunkBytes::optimizer)
      .def_readonly("inputs", &ChunkBytes::inputs)
      .def_readonly("saved", &ChunkBytes::saved)
      .def_readonly("kept", &ChunkBytes::kept)
      .def_readonly("forward", &ChunkBytes::forward)
      .def_readonly("backward", &ChunkBytes::backward);
  py::class_<HeadBytes>(module, "HeadBytes", "What the last chunk needs where its head's backward is in its forward.")
      .def(py::init([](std::int64_t gradients, std::int64_t saved, std::int64_t forward, std::int64_t backward) {
             return HeadBytes{gradients, saved, forward, backward};
           }),
           py::kw_only(), py::arg("gradients"), py::arg("saved"), py::arg("forward"), py::arg("backward"));
  py::class_<MemoryModel>(module, "MemoryModel", "What the stages of a replica need; immutable.")
      .def(py::init([](std::vector<ChunkBytes> chunks, std::vector<std::int64_t> host, std::vector<std::int64_t> update,
                       bool gradients_stay, std::optional<HeadBytes> head) {
             return MemoryModel{.chunks = std::move(chunks),
                                .host = std::move(host),
                                .update = std::move(update),
                                .gradients_stay = gradients_stay,
                                .head = head};
           }),
           py::arg("chunks"), py::kw_only(), py::arg("host") = std::vector<std::int64_t>{},
           py::arg("update") = std::vector<std::int64_t>{}, py::arg("gradients_stay") = true,
           py::arg("head") = std::nullopt)
      .def_readonly("chunks", &MemoryModel::chunks);
  py::class_<MemoryPoint>(module, "MemoryPoint", "Bytes of a stage from a moment on.")
      .def_readonly("time_ns", &MemoryPoint::time_ns)
      .def_readonly("uses", &MemoryPoint::uses)
      .def_readonly("pool", &MemoryPoint::pool)
      .def_property_readonly("device", &MemoryPoint::device);
  py::class_<StageMemory>(module, "StageMemory", "Bytes of a stage over a step.")
      .def_readonly("points", &StageMemory::points)
      .def_readonly("peak", &StageMemory::peak)
      .def_readonly("most_pool", &StageMemory::most_pool)
      .def_readonly("host", &StageMemory::host);
  module.def("memory_use_names", [] { return core::kMemoryUseNames; });
  module.def(
      "memory_curves",
      [](const core::Schedule& schedule, const MemoryModel& model, const core::TrainingStep& step) {
        return core::memory_curves(schedule, model, core::compute_times(step, schedule.shape),
                                   core::copy_times(step, schedule.shape));
      },
      py::arg("schedule"), py::arg("model"), py::arg("step"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_simulator(py::module_& module) {
  bind_model(module);
  bind_step(module);
  bind_memory(module);
  module.def("dp_sync_names", [] { return core::kDpSyncNames; });
  module.def(
      "simulate_step",
      [](const core::Schedule& schedule, const ClusterModel& model, int max_steps, bool breakdown, bool spans) {
        return core::simulate_step(schedule, model, {max_steps, breakdown, spans});
      },
      py::arg("schedule"), py::arg("model"), py::arg("max_steps") = 8, py::arg("breakdown") = true,
      py::arg("spans") = false, py::call_guard<py::gil_scoped_release>());
}

}  // namespace fold3d::bindings
