#include "bindings/operator_run.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "runtime/watch/operator_run.h"

namespace py = pybind11;

namespace fold3d::bindings {

void bind_operator_run(py::module_& module) {
  using runtime::NumberSet;
  using runtime::OperatorRun;
  py::class_<NumberSet, std::shared_ptr<NumberSet>>(module, "NumberSet", "Numbers of sequences of operators.")
      .def(py::init<>())
      .def("add", &NumberSet::add, py::arg("number"), "Returns whether it was new.")
      .def("__contains__", &NumberSet::contains, py::arg("number"));
  py::class_<OperatorRun, std::shared_ptr<OperatorRun>>(
      module, "OperatorRun", "Which sequences of three operators of torch ran while it was swapped in.")
      .def(py::init([](std::shared_ptr<NumberSet> known) { return std::make_shared<OperatorRun>(std::move(known)); }),
           py::arg("known"), "`known`: sequences that are not noted.")
      .def_property_readonly("unknown", &OperatorRun::unknown,
                             "[(sequence, name of its last operator)], in the order in which they came.");
  module.def("swap_operator_run", &runtime::swap_operator_run, py::arg("run"),
             "Notes this thread's operators in `run` from now on, None: nowhere; returns where they were noted.");
  module.def("pause_operators", &runtime::pause_operators, py::arg("pauses"),
             "Whether what runs from now on is fold3d's own; returns what it was.");
  module.def("note_product", &runtime::note_product, "A product of matrices was computed in some other way.");
}

}  // namespace fold3d::bindings
