#include "bindings/bindings.h"

#include <memory>
#include <string>

#include "comm/arbiter/nic_arbiter.h"

namespace py = pybind11;

namespace fold3d::bindings {

namespace {

py::dict counters_of(const comm::NicArbiter& arbiter) {
  const comm::NicArbiter::Counters counters = arbiter.counters();
  py::dict out;
  out["preemptions"] = counters.preemptions;
  out["yields"] = counters.yields;
  out["held_ns"] = counters.held_ns;
  out["preempted_ns"] = counters.preempted_ns;
  out["delayed_ns"] = counters.delayed_ns;
  out["messages"] = counters.messages;
  out["message_bytes"] = counters.message_bytes;
  out["message_holds"] = counters.message_holds;
  out["message_held_ns"] = counters.message_held_ns;
  return out;
}

}  // namespace

void bind_nic_arbiter(py::module_& module) {
  py::class_<comm::NicArbiter, std::shared_ptr<comm::NicArbiter>>(
      module, "NicArbiter", "Lets pipeline messages go before data-parallel chunks, for all ranks of a host.")
      .def(py::init([](const std::string& name, bool preempt, bool gathers_first) {
             return std::make_shared<comm::NicArbiter>(
                 name, comm::NicArbiter::Options{.rule = {}, .preempt = preempt, .gathers_first = gathers_first});
           }),
           py::arg("name") = "", py::arg("preempt") = true, py::arg("gathers_first") = false,
           "`name`: of the shared memory of the host's ranks, without slashes; empty: this process alone. "
           "`gathers_first`: reduces yield to gathers, where gathers yield to reduces otherwise.")
      .def(
          "counters", &counters_of,
          "What this rank saw: preemptions (chunks held for messages or TP.sync), yields (held for DP.sync's first "
          "kind), held_ns, "
          "preempted_ns (of these, in preemptions), delayed_ns (messages behind chunks that were under way), messages, "
          "message_bytes, message_holds and message_held_ns (messages that waited for TP.sync).")
      .def("unlink", &comm::NicArbiter::unlink,
           "Takes the shared memory's name away, when all ranks of the host have their arbiter.");
}

}  // namespace fold3d::bindings
