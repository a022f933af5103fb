#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>

#include "bindings/bindings.h"
#include "comm/base/moment.h"
#include "runtime/device/stream_clock.h"

namespace py = pybind11;

namespace fold3d::bindings {

using comm::Moment;
using runtime::StreamClock;

void bind_stream_clock(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<Moment>(module, "Moment", "A point in time, which a device may not have come to yet.")
      .def("ns", &Moment::ns, unlocked, "Nanoseconds of time.monotonic; None: it is not known yet.")
      .def(
          "wait",
          [](const Moment& moment) {
            moment.wait();
            return moment.ns().value();
          },
          unlocked, "The same, after waiting for it.");
  py::class_<StreamClock, std::shared_ptr<StreamClock>>(
      module, "StreamClock", "When a device comes to points of its streams, on the host's clock; see stream_clock.h.")
      .def(py::init(
               [](const py::object& device) { return std::make_shared<StreamClock>(py::cast<c10::Device>(device)); }),
           py::arg("device"))
      .def_property_readonly("is_of_device", &StreamClock::is_of_device,
                             "Whether now() is the device's time; False on the CPU.")
      .def_property_readonly("tells_time", &StreamClock::tells_time,
                             "Whether now() is when things happen: False on a device whose events note no time.")
      .def("anchor", &StreamClock::anchor, "A step begins: the clocks are compared.")
      .def(
          "now", [](StreamClock& clock) { return clock.now(); },
          "When what the current stream has queued up to now is done; without a device, now.");
}

}  // namespace fold3d::bindings
