#include "bindings/bindings.h"

#include <ATen/record_function.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bindings/signals.h"
#include "comm/arbiter/own_process.h"
#include "comm/base/clock.h"
#include "comm/bucket/bucket_sync.h"
#include "comm/bucket/collective_ring.h"
#include "comm/bucket/slice_meter.h"
#include "comm/ring/credits.h"
#include "comm/tcp/tcp_ring_peers.h"
#include "core/network/slice_rule.h"
#include "runtime/c10d/ring_connection_c10d.h"
#include "runtime/collectives/collectives_c10d.h"
#include "runtime/device/stream_clock.h"
#include "runtime/device/tensor_buffer.h"

namespace py = pybind11;

namespace fold3d::bindings {

namespace {

using comm::NicArbiter;
using Traffic = NicArbiter::Traffic;

using comm::milliseconds;

comm::Collective collective_of(int bucket, const at::Tensor& tensor, double scale, bool as_bfloat16,
                               c10::Device device) {
  const auto reject = [&](const std::string& what) {
    throw std::invalid_argument("the tensor of bucket " + std::to_string(bucket) + " must be " + what);
  };
  if (!tensor.is_contiguous() || tensor.dim() != 1) reject("flat and contiguous");
  if (tensor.is_conj() || tensor.is_neg()) reject("no conjugate or negative view");  // a copy would be summed
  if (tensor.device().type() != device.type()) reject("on device " + device.str() + ", not " + tensor.device().str());
  const comm::Tensor wrapped = runtime::wrap(tensor);
  comm::Number element = comm::Number::kOther;
  if (tensor.scalar_type() == at::kFloat) element = comm::Number::kFloat32;
  if (tensor.scalar_type() == at::kDouble) element = comm::Number::kFloat64;
  return {.step = 0,
          .bucket = bucket,
          .buffer = wrapped.buffer,
          .element_bytes = wrapped.desc.element_bytes,
          .element = element,
          .scale = scale,
          .as_bfloat16 = as_bfloat16};
}

/// What Python sees as `BucketSync`.
class PyBucketSync {
 public:
  PyBucketSync(int rank, int size, std::shared_ptr<NicArbiter> arbiter, const py::object& device,
               double timeout_seconds, const std::string& name, std::size_t slice_bytes,
               const std::shared_ptr<comm::TcpRingPeers>& peers, const std::string& reduce_group,
               const std::string& gather_group, bool library, const core::Hosts& hosts, bool makes_room,
               std::shared_ptr<runtime::StreamClock> clock, int lines)
      : device_(py::cast<c10::Device>(device)),
        by_library_(library || !device_.is_cpu()),
        credits_(std::make_shared<comm::Credits>(slice_bytes, lines)),
        meter_(std::make_shared<comm::SliceMeter>()) {
    const bool has_groups = !reduce_group.empty() && !gather_group.empty();
    if ((peers != nullptr) == has_groups || (peers && by_library_)) {
      throw std::invalid_argument(
          "a bucket sync needs peers or two groups, not both; peers are for rings in host memory only");
    }
    if (lines < 1 || (!peers && lines > 1)) throw std::invalid_argument("a ring has one line, over peers perhaps more");
    if (!clock) clock = std::make_shared<runtime::StreamClock>(device_);
    const auto stream = [&](Traffic traffic) -> std::unique_ptr<comm::CollectiveStream> {
      const std::string& group = traffic == Traffic::kReduce ? reduce_group : gather_group;
      if (by_library_) {
        return std::make_unique<runtime::C10dCollectives>(
            runtime::C10dCollectives::Options{rank, size, traffic, slice_bytes, hosts, makes_room,
                                              milliseconds(timeout_seconds)},
            group, device_, arbiter, clock, meter_);
      }
      std::vector<std::shared_ptr<comm::RingConnection>> connections;
      for (int line = 0; peers && line < lines; ++line) connections.push_back(peers->connection(traffic, line));
      if (!peers) connections.push_back(std::make_shared<runtime::C10dRingConnection>(group, rank, size));
      return std::make_unique<comm::CollectiveRing>(
          comm::Ring::Options{.rank = rank, .size = size, .traffic = traffic, .hosts = hosts, .credits = credits_},
          std::move(connections), arbiter);
    };
    auto reduce_stream = stream(Traffic::kReduce);
    auto gather_stream = stream(Traffic::kGather);
    sync_ = comm::make_for_process<comm::BucketSync>(
        comm::BucketSync::Options{
            .timeout = milliseconds(timeout_seconds), .name = name, .size = size, .while_waiting = &handle_signals},
        std::move(arbiter), std::move(reduce_stream), std::move(gather_stream));
  }

  ~PyBucketSync() { close(); }

  void begin(std::int64_t step, const std::vector<int>& gather_order) { sync().begin(step, gather_order); }
  void reduce(int bucket, const at::Tensor& gradients, double scale, bool as_bfloat16) {
    const comm::Collective collective = collective_of(bucket, gradients, scale, as_bfloat16, device_);
    sync().reduce(collective);
    keep_mark(reduced_, collective);
    keep_mark(gathered_, collective);  // a gather that is planned goes on with the same memory
  }
  void gather(int bucket, const at::Tensor& tensor, bool as_bfloat16) {
    comm::Collective collective = collective_of(bucket, tensor, 1.0, as_bfloat16, device_);
    // The current stream, on which the tensor is ready, need not have waited for the sums in it.
    const auto before = reduced_.find(bucket);
    if (before != reduced_.end() && before->second->tensor().data_ptr() == tensor.data_ptr()) {
      collective.sums = before->second;
    }
    sync().gather(collective);
    keep_mark(gathered_, collective);
  }

  void wait_reduced(int bucket, std::optional<std::int64_t> step) {
    RECORD_USER_SCOPE("DP.sync wait gradients bucket " + std::to_string(bucket));
    without_gil([bucket, step](comm::BucketSync& sync) { sync.wait_reduced(bucket, step); });
    if (const auto found = reduced_.find(bucket); found != reduced_.end()) {
      found->second->ready().block(runtime::current_stream(found->second->tensor().device()));
    }
  }
  void wait_gathered(int bucket) {
    RECORD_USER_SCOPE("DP.sync wait weights bucket " + std::to_string(bucket));
    without_gil([bucket](comm::BucketSync& sync) { sync.wait_gathered(bucket); });
    if (const auto found = gathered_.find(bucket); found != gathered_.end()) {
      found->second->gathered().block(runtime::current_stream(found->second->tensor().device()));
    }
  }
  void drain() {
    without_gil([](comm::BucketSync& sync) { sync.drain(); });
  }
  bool is_gathered(int bucket) { return sync().is_gathered(bucket); }
  bool by_library() const { return by_library_; }
  double bandwidth() const { return by_library_ ? meter_->bandwidth() : credits_->bandwidth(); }
  double sustained_bandwidth() const { return by_library_ ? meter_->bandwidth() : credits_->sustained(); }

  py::list take_records() {
    py::list out;
    for (const comm::CollectiveRecord& record : sync().take_records()) {
      out.append(py::make_tuple(comm::to_string(record.traffic), "bucket " + std::to_string(record.bucket),
                                record.start_ns, record.end_ns, record.bytes));
    }
    return out;
  }

  void abort(const std::string& reason) {
    if (!sync_) return;
    without_gil([&reason](comm::BucketSync& sync) { sync.abort(reason); });
  }

  void close() {
    std::shared_ptr<comm::BucketSync> sync = std::move(sync_);
    if (!sync) return;
    reduced_.clear();
    gathered_.clear();
    // The streams' threads may free tensors while they end, and freeing one that Python has seen takes the GIL.
    const py::gil_scoped_release release;
    if (process_.is_here()) sync->close();
    sync.reset();
  }

 private:
  comm::BucketSync& sync() {
    if (!sync_) throw std::runtime_error("the bucket sync is closed");
    return *sync_;
  }

  /// It stays alive: another thread may close meanwhile.
  template <class Call>
  void without_gil(Call call) {
    sync();
    std::shared_ptr<comm::BucketSync> copy = sync_;
    const py::gil_scoped_release release;
    const std::shared_ptr<comm::BucketSync> sync = std::move(copy);  // goes without the GIL, as in close()
    call(*sync);
  }

  /// By bucket, what carries the marks that streams wait for; host memory has none.
  using Marks = std::map<int, std::shared_ptr<runtime::TensorBuffer>>;

  void keep_mark(Marks& marks, const comm::Collective& collective) {
    if (device_.is_cpu()) return;
    marks[collective.bucket] = std::static_pointer_cast<runtime::TensorBuffer>(collective.buffer);
  }

  const comm::OwnProcess process_;
  const c10::Device device_;
  const bool by_library_;
  const std::shared_ptr<comm::Credits> credits_;   // of rings
  const std::shared_ptr<comm::SliceMeter> meter_;  // of a library's collectives
  std::shared_ptr<comm::BucketSync> sync_;
  Marks reduced_, gathered_;  // of the newest reduce-scatter and of the newest gather
};

void bind_ring_peers(py::module_& module) {
  py::class_<comm::TcpRingPeers, std::shared_ptr<comm::TcpRingPeers>>(
      module, "RingPeers",
      "The lines of one replica around the ring of its stage, or of a tensor-parallel rank around its group, over TCP, "
      "for host memory.")
      .def(py::init([](int rank, int size, const std::string& host, std::string secret, std::string job,
                       bool tensor_parallel) {
             using Members = comm::TcpRingPeers::Members;
             return std::make_shared<comm::TcpRingPeers>(
                 rank, size, host, std::move(secret), std::move(job),
                 tensor_parallel ? Members::kTensorParallel : Members::kReplicas);
           }),
           py::arg("rank"), py::arg("size"), py::arg("host"), py::arg("secret"), py::arg("job") = "", py::kw_only(),
           py::arg("tensor_parallel") = false)
      .def_property_readonly("port", [](const comm::TcpRingPeers& peers) { return peers.endpoint().port; })
      .def(
          "connect",
          [](comm::TcpRingPeers& peers, const std::pair<std::string, int>& next, double timeout_seconds) {
            const py::gil_scoped_release release;
            peers.connect({next.first, next.second}, milliseconds(timeout_seconds));
          },
          py::arg("next"), py::arg("timeout_seconds"), "Connects to where the next member listens; all members call.")
      .def_property_readonly_static("MOST_LINES", [](const py::object&) { return comm::TcpRingPeers::kMostLines; })
      .def("lines_needed", &comm::TcpRingPeers::lines_needed,
           "On how many lines a replica's bucket should travel, by the round trip to the next; after connect().")
      .def("abort", &comm::TcpRingPeers::abort, py::arg("reason"), py::call_guard<py::gil_scoped_release>(),
           "Ends connect() and all use of the lines with an error; any thread.");
}

}  // namespace

void bind_bucket_sync(py::module_& module) {
  bind_ring_peers(module);
  module.def("pause_bytes", &comm::Credits::pause_bytes, py::arg("bandwidth"),
             "What DP.sync sends before a waiting message of PP.sync at this bandwidth, in bytes per second.");
  module.def("library_slice_bytes", &core::SliceRule::bytes, py::arg("replicas"), py::arg("speed") = 0.0,
             "What each of so many replicas sends in a slice of a library's collective at this speed, in bytes per "
             "second of one of them; 0.0: nobody has measured it.");
  py::class_<PyBucketSync>(
      module, "BucketSync",
      "DP.sync of one rank: reduce-scatters and all-gathers of flat buckets over the replicas of its stage.")
      .def(py::init<int, int, std::shared_ptr<NicArbiter>, py::object, double, const std::string&, std::size_t,
                    const std::shared_ptr<comm::TcpRingPeers>&, const std::string&, const std::string&, bool,
                    const core::Hosts&, bool, std::shared_ptr<runtime::StreamClock>, int>(),
           py::arg("rank"), py::arg("size"), py::arg("arbiter"), py::arg("device"), py::arg("timeout_seconds"),
           py::arg("name"), py::kw_only(), py::arg("slice_bytes"), py::arg("peers") = nullptr,
           py::arg("reduce_group") = "", py::arg("gather_group") = "", py::arg("library") = false,
           py::arg("hosts") = core::Hosts{}, py::arg("makes_room") = true, py::arg("clock") = nullptr,
           py::arg("lines") = 1,
           "The collectives go over `peers`, or over two process groups of the replicas, given by name, with host or "
           "device memory. slice_bytes: 0 follows the measured speed. library: the groups' own collectives carry host "
           "memory, too, as they always do device memory, in the place of rings; for tests of these without a device. "
           "hosts: of each replica, as numbers; none: a host for each. makes_room: whether messages go over the cards "
           "that the groups' own collectives use, so that these go in slices; rings always do. The same on all "
           "replicas. clock: of the device; None: one of its own. lines: on how many of the peers' a bucket travels, 1 "
           "to "
           "RingPeers.MOST_LINES; the same on all replicas.")
      .def("begin", &PyBucketSync::begin, py::arg("step"), py::arg("gather_order"),
           "Begins a step; the buckets of gather_order are gathered behind their reduce-scatters, in this order.")
      .def("reduce", &PyBucketSync::reduce, py::arg("bucket"), py::arg("gradients"), py::arg("scale"),
           py::arg("as_bfloat16") = false,
           "Queues the reduce-scatter of a bucket in place; its own shard ends as the sum times scale. as_bfloat16: "
           "float32 gradients travel as bfloat16, and the sum is rounded to it. Its planned gather goes the same way.")
      .def("gather", &PyBucketSync::gather, py::arg("bucket"), py::arg("tensor"), py::arg("as_bfloat16") = false,
           "Queues the all-gather of a bucket in place; every replica gives its own shard.")
      .def("wait_reduced", &PyBucketSync::wait_reduced, py::arg("bucket"), py::arg("step") = py::none(),
           "Blocks until the reduce-scatter of the bucket in this step, or in `step`, is done; on a device until it is "
           "launched, and makes the current stream wait for the rest.")
      .def("wait_gathered", &PyBucketSync::wait_gathered, py::arg("bucket"),
           "The same for the newest all-gather of the bucket, if there is one.")
      .def("drain", &PyBucketSync::drain, "Blocks until all that could begin is done, on a device, too.")
      .def("is_gathered", &PyBucketSync::is_gathered, py::arg("bucket"), "Whether wait_gathered would return at once.")
      .def_property_readonly("by_library", &PyBucketSync::by_library,
                             "Whether a library's collectives carry the buckets, as they do device memory; else rings.")
      .def(
          "bandwidth", &PyBucketSync::bandwidth,
          "Measured speed in bytes per second that this rank sends, 0.0 as long as it is not known: of its own line to "
          "the next replica; of a library's collectives that of the fastest whole one of late, which all replicas "
          "move.")
      .def("sustained_bandwidth", &PyBucketSync::sustained_bandwidth,
           "The same in the long run, with what slows down for a while: pipeline messages, a neighbour that is not "
           "ready; of a library's collectives as bandwidth().")
      .def("take_records", &PyBucketSync::take_records,
           "(lane, bucket, start_ns, end_ns, bytes) of every collective completed since the last call.")
      .def("abort", &PyBucketSync::abort, py::arg("reason"), "Ends all communication; any thread.")
      .def("close", &PyBucketSync::close, "Ends the streams and their threads.");
}

}  // namespace fold3d::bindings
