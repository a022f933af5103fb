#include "bindings/operator_run.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "runtime/watch/operator_run.h"

namespace py = pybind11;

namespace fold3d::bindings {
namespace {

using runtime::mixed;
using runtime::number_of;
using runtime::NumberSet;
using runtime::OperatorRun;

constexpr std::uint64_t kArgumentBits = 15;  // of `Origin::given`, from 1 on; parameters and buffers have the others

/// The code is given the tensors in nested tuples, lists and dicts. `place`: a number of where they stand in its call.
void give(OperatorRun& run, py::handle value, std::uint64_t place) {
  if (THPVariable_Check(value.ptr())) {
    run.given(THPVariable_Unpack(value.ptr()), place, 1 + place % kArgumentBits);
  } else if (PyTuple_Check(value.ptr()) || PyList_Check(value.ptr())) {
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(value.ptr());
    for (Py_ssize_t index = 0; index < size; ++index) {
      give(run, PySequence_Fast_GET_ITEM(value.ptr(), index), mixed(place, static_cast<std::uint64_t>(index) + 1));
    }
  } else if (PyDict_Check(value.ptr())) {
    Py_ssize_t next = 0;
    PyObject *key = nullptr, *one = nullptr;
    while (PyDict_Next(value.ptr(), &next, &key, &one) != 0) {
      Py_ssize_t size = 0;
      const char* const text = PyUnicode_Check(key) ? PyUnicode_AsUTF8AndSize(key, &size) : "";
      give(run, one, mixed(place, number_of({text, static_cast<std::size_t>(size)})));
    }
  }
}

std::shared_ptr<OperatorRun> run_of(std::shared_ptr<NumberSet> known, const py::list& held, const py::object& call) {
  auto run = std::make_shared<OperatorRun>(std::move(known));
  give(*run, call, number_of("call"));
  for (const py::handle one : held) {
    PyObject* const entry = one.ptr();  // (dict, key, number, bit)
    PyObject* const tensor = PyDict_GetItem(PyTuple_GET_ITEM(entry, 0), PyTuple_GET_ITEM(entry, 1));
    if (tensor == nullptr || !THPVariable_Check(tensor)) continue;
    run->given(THPVariable_Unpack(tensor), PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(entry, 2)),
               static_cast<unsigned>(PyLong_AsLong(PyTuple_GET_ITEM(entry, 3))));
  }
  return run;
}

}  // namespace

void bind_operator_run(py::module_& module) {
  py::class_<NumberSet, std::shared_ptr<NumberSet>>(module, "NumberSet", "Numbers of what operators ran.")
      .def(py::init<>())
      .def("add", &NumberSet::add, py::arg("number"), "Returns whether it was new.")
      .def("__contains__", &NumberSet::contains, py::arg("number"));
  py::class_<OperatorRun, std::shared_ptr<OperatorRun>>(
      module, "OperatorRun",
      "Which sequences of three operators of torch ran while it was swapped in, and of what tensors each.")
      .def(py::init(&run_of), py::arg("known"), py::arg("held") = py::list(), py::arg("call") = py::none(),
           "`known`: numbers that are not noted. `held`: [(dict, key, number of its name, bit from 16 to 63)] of the\n"
           "parameters and buffers of the code that runs. `call`: its arguments.")
      .def_property_readonly("unknown", &OperatorRun::unknown,
                             "[(number, name of the last operator)], in the order in which they came.");
  module.def("swap_operator_run", &runtime::swap_operator_run, py::arg("run"),
             "Notes this thread's operators in `run` from now on, None: nowhere; returns where they were noted.");
  module.def("pause_operators", &runtime::pause_operators, py::arg("pauses"),
             "Whether what runs from now on is fold3d's own; returns what it was.");
  module.def("note_product", &runtime::note_product, py::arg("result"), py::arg("operands"),
             "A product of matrices was computed in some other way, of the first three operands that are not None.");
  module.def("same_origin", &runtime::same_origin, py::arg("result"), py::arg("source"),
             "`result` stands for `source`: it comes from where that does.");
}

}  // namespace fold3d::bindings
