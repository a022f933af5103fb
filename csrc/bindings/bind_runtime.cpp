#include "bindings/bindings.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "bindings/saved_tensor_hooks.h"
#include "bindings/signals.h"
#include "comm/arbiter/own_process.h"
#include "comm/base/clock.h"
#include "comm/base/errors.h"
#include "comm/base/moment.h"
#include "memory/host_memory.h"
#include "memory/slot/tier.h"
#include "runtime/c10d/communicator_factory.h"
#include "runtime/c10d/heartbeat.h"
#include "runtime/device/stream_clock.h"
#include "runtime/executor/executor.h"
#include "runtime/memory/cpu_bytes.h"
#include "runtime/offload/offloader.h"
#include "runtime/watch/operator_run.h"

namespace py = pybind11;

namespace fold3d::bindings {

using runtime::OffloadCounters;
using runtime::OffloadOptions;
using runtime::SavedTensor;
using runtime::StashBatch;

namespace {

/// What a run hands to its chunks, and what they give back, by micro-batch.
struct PyRun {
  std::vector<py::object> micro_batches, results;
};

/// A Python object with forward(micro_batch, tensors) -> (tensors, result), which in schedules with OFFLOAD gets a
/// StashBatch besides, and reduce() -> None; turn_to(number, step_before) in runs without a flush; and, for schedules
/// with RECOMPUTE, forward_first(micro_batch, tensors) -> (tensors, result, kept) and recompute(micro_batch, tensors,
/// kept) -> tensors.
class PyChunk final : public runtime::Chunk {
 public:
  explicit PyChunk(py::object chunk) : chunk_(std::move(chunk)), forward_(chunk_.attr("forward")) {}

  ~PyChunk() override {
    const py::gil_scoped_acquire gil;
    chunk_ = py::object();
    forward_ = py::object();
  }

  /// `run`: of the forwards to come; null: there are none.
  void use(PyRun* run) { run_ = run; }

  std::vector<at::Tensor> forward(int micro_batch, std::vector<at::Tensor> inputs,
                                  const std::shared_ptr<runtime::StashBatch>& batch) override {
    const py::gil_scoped_acquire gil;
    const py::tuple sent_and_result = batch ? forward_(input_of(micro_batch), std::move(inputs), batch)
                                            : forward_(input_of(micro_batch), std::move(inputs));
    keep_result(micro_batch, sent_and_result[1]);
    return sent_and_result[0].cast<std::vector<at::Tensor>>();
  }

  std::vector<at::Tensor> forward_first(int micro_batch, std::vector<at::Tensor> inputs,
                                        std::vector<at::Tensor>& kept) override {
    const py::gil_scoped_acquire gil;
    const py::tuple made = chunk_.attr("forward_first")(input_of(micro_batch), std::move(inputs));
    keep_result(micro_batch, made[1]);
    kept = made[2].cast<std::vector<at::Tensor>>();
    return made[0].cast<std::vector<at::Tensor>>();
  }

  std::vector<at::Tensor> recompute(int micro_batch, std::vector<at::Tensor> inputs,
                                    std::vector<at::Tensor> kept) override {
    const py::gil_scoped_acquire gil;
    const py::object sent = chunk_.attr("recompute")(input_of(micro_batch), std::move(inputs), std::move(kept));
    return sent.cast<std::vector<at::Tensor>>();
  }

  void turn_to(int micro_batch, bool step_before) override {
    const py::gil_scoped_acquire gil;
    chunk_.attr("turn_to")(micro_batch, step_before);
  }

  void reduce() override {
    const py::gil_scoped_acquire gil;
    chunk_.attr("reduce")();
  }

  bool is_rebuilt(torch::autograd::Node& node) override { return has_saved_tensor_hooks(node); }

 private:
  const py::object& input_of(int micro_batch) const {
    return run_->micro_batches.at(static_cast<std::size_t>(micro_batch));
  }
  void keep_result(int micro_batch, py::object result) {
    if (!result.is_none()) run_->results.at(static_cast<std::size_t>(micro_batch)) = std::move(result);
  }

  py::object chunk_, forward_;
  PyRun* run_ = nullptr;
};

const char* lane_of(const runtime::Span& span) {
  if (span.is_wait) return "wait";
  if (!core::is_copy(span.action.kind)) return "compute";
  return core::is_offload(span.action.kind) ? "offload" : "prefetch";
}

/// What Python sees as `Executor`: the executor and the communicator it talks through.
class PyExecutor {
 public:
  PyExecutor(const std::vector<py::object>& chunks, int stage, int pp, const std::map<std::string, std::string>& groups,
             const py::object& device, double timeout_seconds, const std::string& name,
             const std::shared_ptr<comm::TcpPeers>& peers, const std::shared_ptr<comm::NicArbiter>& arbiter,
             const core::Hosts& hosts, std::optional<runtime::OffloadOptions> offload,
             std::shared_ptr<runtime::StreamClock> clock, bool makes_room, const std::string& style) {
    if (!clock) clock = std::make_shared<runtime::StreamClock>(py::cast<c10::Device>(device));
    for (const py::object& chunk : chunks) chunks_.push_back(std::make_shared<PyChunk>(chunk));
    std::shared_ptr<runtime::Offloader> offloader;
    if (offload) {
      offload->timeout = comm::milliseconds(timeout_seconds);
      offload->while_waiting = &handle_signals;
      offloader = comm::make_for_process<runtime::Offloader>(py::cast<c10::Device>(device), *std::move(offload), clock);
    }
    if (pp > 1) {
      runtime::GroupNames names{groups.at("send_forward"), groups.at("recv_forward"), groups.at("send_backward"),
                                groups.at("recv_backward")};
      constexpr std::array kQueues{"send_forward", "recv_forward", "send_backward", "recv_backward"};
      for (std::size_t queue = 0; queue < kQueues.size(); ++queue) {
        const auto found = groups.find(std::string(kQueues[queue]) + "_against");
        if (found != groups.end()) names.against[queue] = found->second;
      }
      comm::Options options;
      options.shape = {pp, static_cast<int>(chunks.size()), 1, core::parse_style(style)};
      options.stage = stage;
      options.timeout = comm::milliseconds(timeout_seconds);
      options.name = name;
      options.hosts = hosts;
      options.makes_room = makes_room;
      options.while_waiting = &handle_signals;
      // The communicator keeps the offloader, in whose pool its messages land.
      std::shared_ptr<comm::Landing> landing;
      if (offloader) landing = {offloader, &offloader->landing()};
      communicator_ = runtime::make_communicator(options, py::cast<c10::Device>(device), names, peers, arbiter,
                                                 std::move(landing), clock);
    }
    executor_ = comm::make_for_process<runtime::Executor>(
        communicator_, stage, std::vector<std::shared_ptr<runtime::Chunk>>(chunks_.begin(), chunks_.end()),
        std::move(offloader), std::move(clock));
  }

  ~PyExecutor() { close(); }

  std::vector<py::object> run(const core::Schedule& schedule, int stage, bool backward,
                              std::vector<py::object> micro_batches, bool goes_on, bool is_left) {
    // They stay alive: what runs in a chunk, such as a loss or a signal's handler, may close.
    std::shared_ptr<runtime::Executor> copy = open_executor();
    const std::vector<std::shared_ptr<PyChunk>> chunks = chunks_;
    PyRun run{std::move(micro_batches), {}};
    run.results.resize(run.micro_batches.size(), py::none());
    const auto use = [&chunks](PyRun* one) {
      for (const std::shared_ptr<PyChunk>& chunk : chunks) chunk->use(one);
    };
    use(&run);
    try {
      const py::gil_scoped_release release;
      const std::shared_ptr<runtime::Executor> executor = std::move(copy);  // goes without the GIL, as in close()
      executor->run(schedule.shape, schedule.ranks.at(static_cast<std::size_t>(stage)), backward, {goes_on, is_left});
    } catch (...) {
      use(nullptr);
      throw;
    }
    use(nullptr);
    return std::move(run.results);
  }

  void abort(const std::string& reason) {
    // It stays alive: another thread may close while this one aborts.
    std::shared_ptr<comm::Communicator> copy = communicator_;
    const py::gil_scoped_release release;
    const std::shared_ptr<comm::Communicator> communicator = std::move(copy);  // goes without the GIL, as in close()
    if (communicator) communicator->abort(reason);
  }

  std::string current_action() const { return executor_ ? executor_->current_action() : ""; }

  py::list take_spans() {
    py::list out;
    for (const runtime::Span& span : open_executor()->take_spans()) {
      out.append(
          py::make_tuple(lane_of(span), core::to_string(span.action), *span.start.ns(), *span.end.ns(), span.bytes));
    }
    return out;
  }

  void keep(const std::vector<at::Tensor>& tensors) {
    if (runtime::Offloader* const offloader = open_executor()->offloader()) offloader->keep(tensors);
  }

  std::optional<runtime::OffloadCounters> offload_counters() const {
    const runtime::Offloader* const offloader = executor_ ? executor_->offloader() : nullptr;
    return offloader == nullptr ? std::nullopt : std::optional(offloader->counters());
  }

  py::list take_records() {
    py::list out;
    if (!communicator_) return out;
    for (const comm::Record& record : communicator_->take_records()) {
      out.append(py::make_tuple(comm::to_string(record.queue), core::to_string(record.action), record.start_ns,
                                record.end_ns, record.bytes));
    }
    return out;
  }

  void close() {
    auto executor = std::move(executor_);
    auto communicator = std::move(communicator_);
    auto chunks = std::move(chunks_);
    // Tensors may be freed while the communicator's threads are joined, and freeing one that Python has seen takes the
    // GIL.
    const py::gil_scoped_release release;
    executor.reset();
    communicator.reset();
    chunks.clear();
  }

 private:
  std::shared_ptr<runtime::Executor> open_executor() const {
    if (!executor_) throw std::runtime_error("the executor is closed");
    return executor_;
  }

  std::vector<std::shared_ptr<PyChunk>> chunks_;
  std::shared_ptr<comm::Communicator> communicator_;
  std::shared_ptr<runtime::Executor> executor_;
};

}  // namespace

void bind_stream_clock(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<comm::Moment>(module, "Moment", "A point in time, which a device may not have come to yet.")
      .def("ns", &comm::Moment::ns, unlocked, "Nanoseconds of time.monotonic; None: it is not known yet.")
      .def(
          "wait",
          [](const comm::Moment& moment) {
            moment.wait();
            return moment.ns().value();
          },
          unlocked, "The same, after waiting for it.");
  py::class_<runtime::StreamClock, std::shared_ptr<runtime::StreamClock>>(
      module, "StreamClock", "When a device comes to points of its streams, on the host's clock; see stream_clock.h.")
      .def(py::init([](const py::object& device) {
             return std::make_shared<runtime::StreamClock>(py::cast<c10::Device>(device));
           }),
           py::arg("device"))
      .def_property_readonly("is_of_device", &runtime::StreamClock::is_of_device,
                             "Whether now() is the device's time; False on the CPU.")
      .def_property_readonly("tells_time", &runtime::StreamClock::tells_time,
                             "Whether now() is when things happen: False on a device whose events note no time.")
      .def("anchor", &runtime::StreamClock::anchor, "A step begins: the clocks are compared.")
      .def(
          "now", [](runtime::StreamClock& clock) { return clock.now(); },
          "When what the current stream has queued up to now is done; without a device, now.");
}

void bind_offload(py::module_& module) {
  py::register_exception<memory::PoolError>(module, "PoolError", PyExc_RuntimeError);
  py::class_<SavedTensor>(module, "SavedTensor", "What a graph keeps of a tensor; its memory may be away.")
      .def_property_readonly("moves", &SavedTensor::moves);
  py::class_<StashBatch, std::shared_ptr<StashBatch>>(module, "StashBatch", "What one stash saves and moves.")
      .def(py::init([] { return std::make_shared<StashBatch>(std::make_shared<runtime::Staying>()); }))
      .def(
          "save",
          [](StashBatch& batch, const at::Tensor& tensor) {
            const runtime::PausedOperators paused;  // copies are no operators of the user's
            return batch.save(tensor);
          },
          py::arg("tensor"), "A pack hook of torch.autograd.graph.saved_tensors_hooks.");
  module.def("least_stash_bytes", [] { return StashBatch::kLeastBytes; }, "Of a tensor that StashBatch.save moves.");
  module.def("unpack_saved", &SavedTensor::tensor, py::arg("saved"),
             "The unpack hook of what StashBatch.save returns.");
  py::class_<OffloadOptions>(module, "OffloadOptions", "How stashes leave the device.")
      .def(py::init([](std::int64_t pool_bytes, const std::string& disk, double bytes_per_second,
                       std::int64_t expected_bytes, bool packs) {
             return OffloadOptions{.pool_bytes = pool_bytes,
                                   .expected_bytes = expected_bytes,
                                   .disk = disk,
                                   .packs = packs,
                                   .bytes_per_second = bytes_per_second};
           }),
           py::arg("pool_bytes") = 0, py::arg("disk") = "", py::arg("bytes_per_second") = 0.0,
           py::arg("expected_bytes") = 0, py::arg("packs") = false,
           "`pool_bytes`: reserved at once; 0: `expected_bytes`, and what the first step asks for beyond. `disk`: "
           "folder; empty: host memory. "
           "`bytes_per_second`: copies take as long as at this rate, both directions together; 0: as long as they do. "
           "`packs`: small pieces are put together by fold3d's kernel.");
  py::class_<OffloadCounters>(module, "OffloadCounters", "Bytes of stashes on both sides.")
      .def_readonly("device_bytes", &OffloadCounters::device_bytes)
      .def_readonly("device_peak", &OffloadCounters::device_peak)
      .def_readonly("pool_bytes", &OffloadCounters::pool_bytes)
      .def_readonly("pool_peak", &OffloadCounters::pool_peak)
      .def_readonly("late", &OffloadCounters::late);
  module.def(
      "available_host_bytes", [] { return memory::available_host_bytes(); },
      "What the host, or the control group, has left.");
}

void bind_runtime(py::module_& module) {
  module.def("count_cpu_bytes", &runtime::count_cpu_bytes, py::arg("on"));
  module.def("allocate_as_host", &runtime::allocate_as_host, py::arg("on"));
  module.def("host_cpu_bytes", &runtime::host_cpu_bytes);
  module.def("live_cpu_bytes", &runtime::live_cpu_bytes);
  module.def("peak_cpu_bytes", &runtime::peak_cpu_bytes);
  module.def("reset_peak_cpu_bytes", &runtime::reset_peak_cpu_bytes);
  module.def("is_counted", &runtime::is_counted, py::arg("tensor"));
  py::register_exception<comm::CommError>(module, "CommError", PyExc_RuntimeError);
  py::class_<runtime::Heartbeat, std::shared_ptr<runtime::Heartbeat>>(module, "Heartbeat",
                                                                      "Signs of life in a store, without the GIL.")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, std::string key, double period_seconds,
                       std::string text) {
             const py::gil_scoped_release release;
             return comm::make_for_process<runtime::Heartbeat>(store, std::move(key),
                                                               comm::milliseconds(period_seconds), std::move(text));
           }),
           py::arg("store"), py::arg("key"), py::arg("period_seconds"), py::arg("text"))
      .def("say", &runtime::Heartbeat::say, py::arg("text"), py::call_guard<py::gil_scoped_release>())
      .def("close", &runtime::Heartbeat::close, py::arg("last"), py::call_guard<py::gil_scoped_release>());
  py::class_<PyExecutor>(module, "Executor", "Walks a rank's actions; owns the rank's communicator.")
      .def(
          py::init<const std::vector<py::object>&, int, int, const std::map<std::string, std::string>&, py::object,
                   double, const std::string&, const std::shared_ptr<comm::TcpPeers>&,
                   const std::shared_ptr<comm::NicArbiter>&, const core::Hosts&, std::optional<runtime::OffloadOptions>,
                   std::shared_ptr<runtime::StreamClock>, bool, const std::string&>(),
          py::arg("chunks"), py::arg("stage"), py::arg("pp"), py::arg("groups"), py::arg("device"),
          py::arg("timeout_seconds"), py::arg("name"), py::arg("peers") = nullptr, py::arg("arbiter") = nullptr,
          py::arg("hosts") = core::Hosts{}, py::arg("offload") = std::nullopt, py::arg("clock") = nullptr,
          py::arg("makes_room") = true, py::arg("style") = "loop",
          "`hosts`: of each stage, as numbers; none: a host for each. `offload`: None: nothing leaves the device. "
          "`clock`: of the device; None: one of its own. `makes_room`: whether DP.sync lets messages pass; the same on "
          "every rank. `style`: on which stages the chunks of the schedules live.")
      .def("run", &PyExecutor::run, py::arg("schedule"), py::arg("stage"), py::arg("backward"),
           py::arg("micro_batches"), py::arg("goes_on") = false, py::arg("is_left") = false,
           "Runs one rank's part of a lowered schedule; `micro_batches`: what each forward is given, anything, by "
           "number. Returns the results of the last chunk's forwards in the same order, None of other chunks'. "
           "`goes_on`: with what the run before has left. `is_left`: another run goes on with what this one leaves.")
      .def("abort", &PyExecutor::abort, py::arg("reason"), "Ends all communication; any thread.")
      .def("current_action", &PyExecutor::current_action, "Text of the action in progress, empty between runs.")
      .def("take_spans", &PyExecutor::take_spans,
           "(lane, action, start_ns, end_ns, bytes) of the compute lane, and of copies to the pool and back, as far as "
           "the times are known.")
      .def("keep", &PyExecutor::keep, py::arg("tensors"),
           "The memory of these stays on the device in the runs to come, whatever a graph saves of it.")
      .def("offload_counters", &PyExecutor::offload_counters, "Bytes on both sides now; None without a pool.")
      .def("take_records", &PyExecutor::take_records, "(lane, action, start_ns, end_ns, bytes) of every transfer.")
      .def("close", &PyExecutor::close, "Ends the communicator's threads.");
}

}  // namespace fold3d::bindings
