#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/signals.h"
#include "comm/arbiter/own_process.h"
#include "comm/base/clock.h"
#include "comm/tcp/tcp_ring_peers.h"
#include "comm/tensor/tensor_sync.h"
#include "ops/c10d_group.h"
#include "ops/ring_group.h"

namespace py = pybind11;

namespace fold3d::bindings {

namespace {

using comm::milliseconds;

/// What Python sees as `TensorSync`.
class PyTensorSync {
 public:
  PyTensorSync(std::string group, int rank, int size, std::shared_ptr<comm::NicArbiter> arbiter, double timeout_seconds,
               const std::string& name, const std::shared_ptr<comm::TcpRingPeers>& peers, const core::Hosts& hosts)
      : name_(std::move(group)), rank_(rank), size_(size) {
    if (peers) {
      sync_ = comm::make_for_process<comm::TensorSync>(
          comm::TensorSync::Options{.rank = rank,
                                    .size = size,
                                    .hosts = hosts,
                                    .timeout = milliseconds(timeout_seconds),
                                    .name = name,
                                    .while_waiting = &handle_signals},
          peers->connection(comm::NicArbiter::Traffic::kTensor), std::move(arbiter));
      account_ = sync_->account();
      group_ = std::make_shared<ops::RingGroup>(sync_);
    } else {
      limits_ = std::make_shared<ops::WaitLimits>(ops::WaitLimits::Options{
          .timeout = milliseconds(timeout_seconds), .name = name, .while_waiting = &handle_signals});
      account_ = std::make_shared<comm::TensorAccount>();
      group_ = std::make_shared<ops::C10dGroup>(name_, limits_, account_);
    }
    ops::add_group(name_, group_);
  }

  ~PyTensorSync() { close(); }

  const std::string& group() const { return name_; }
  int rank() const { return rank_; }
  int size() const { return size_; }

  void keep_records(bool keep) { account_->keep_records(keep); }

  py::list take_records() {
    py::list out;
    for (const comm::TensorAccount::Record& record : account_->take_records()) {
      out.append(
          py::make_tuple(comm::to_string(record.kind), record.issued_ns, record.start_ns, record.end_ns, record.bytes));
    }
    return out;
  }

  py::list take_waits() {
    py::list out;
    for (const comm::TensorAccount::Wait& wait : account_->take_waits()) {
      out.append(py::make_tuple(wait.start_ns, wait.end_ns));
    }
    return out;
  }

  py::dict counters() const {
    const comm::TensorAccount::Counters counters = account_->counters();
    py::dict out;
    out["exchanges"] = counters.exchanges;
    out["bytes"] = counters.bytes;
    out["transfer_ns"] = counters.transfer_ns;
    out["waited_ns"] = counters.waited_ns;
    out["hidden_ns"] = counters.hidden_ns;
    return out;
  }

  void abort(const std::string& reason) {
    const py::gil_scoped_release release;
    if (sync_) sync_->abort(reason);
    if (limits_) limits_->abort(reason);
  }

  void close() {
    if (!process_.is_here()) return;
    const py::gil_scoped_release release;
    ops::remove_group(name_, group_.get());
    if (sync_) sync_->close();
    if (limits_) limits_->abort("the group closed its TP.sync");
  }

 private:
  const comm::OwnProcess process_;
  const std::string name_;
  const int rank_, size_;
  std::shared_ptr<comm::TensorSync> sync_;   // over connections of our own,
  std::shared_ptr<ops::WaitLimits> limits_;  // or over the c10d group
  std::shared_ptr<comm::TensorAccount> account_;
  std::shared_ptr<ops::TensorGroup> group_;
};

}  // namespace

void bind_tensor_sync(py::module_& module) {
  module.def(
      "whole_exchange_bytes", [] { return comm::Exchange::kWholeBytes; },
      "Up to so many bytes that a rank sends in all, an all-reduce of TP.sync goes round its ring with whole tensors.");
  py::class_<PyTensorSync>(module, "TensorSync",
                           "TP.sync of one rank: the operators torch.ops.fold3d.tp_* find it by the name of its group.")
      .def(py::init<std::string, int, int, std::shared_ptr<comm::NicArbiter>, double, const std::string&,
                    const std::shared_ptr<comm::TcpRingPeers>&, const core::Hosts&>(),
           py::arg("group"), py::arg("rank"), py::arg("size"), py::arg("arbiter"), py::arg("timeout_seconds"),
           py::arg("name"), py::kw_only(), py::arg("peers") = nullptr, py::arg("hosts") = core::Hosts{},
           "Tensors in host memory travel over `peers`, or over the c10d group of this name, those on a device always "
           "over the latter. hosts: of each rank, as numbers; none: a host for each.")
      .def_property_readonly("group", &PyTensorSync::group)
      .def_property_readonly("rank", &PyTensorSync::rank)
      .def_property_readonly("size", &PyTensorSync::size)
      .def("keep_records", &PyTensorSync::keep_records, py::arg("keep"),
           "Whether records are kept until they are taken; at first they are not.")
      .def("take_records", &PyTensorSync::take_records,
           "(kind, issued_ns, start_ns, end_ns, bytes) of every exchange of host memory completed since the last call.")
      .def("take_waits", &PyTensorSync::take_waits,
           "(start_ns, end_ns) of every wait for one that ended since the last call, where records are kept.")
      .def("counters", &PyTensorSync::counters,
           "Sums since the beginning, of exchanges of host memory: exchanges, bytes sent, transfer_ns, waited_ns, and "
           "hidden_ns: something was under way that nobody waited for.")
      .def("abort", &PyTensorSync::abort, py::arg("reason"), "Ends all communication; any thread.")
      .def("close", &PyTensorSync::close, "Ends the threads; the group's name is free again.");
}

}  // namespace fold3d::bindings
