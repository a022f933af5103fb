#include "simdevice/bindings/python_line.h"

#include <pybind11/pybind11.h>

#include <string>

namespace simdevice {

namespace {

std::string line_of(PyFrameObject* frame) {
  pybind11::object code =
      pybind11::reinterpret_steal<pybind11::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  const std::string file = pybind11::str(code.attr("co_filename"));
  const bool is_ours = file.ends_with("/simdevice/sim.py");
  if (is_ours || file.find("/torch/") != std::string::npos || file.starts_with("<")) return {};
  return " at " + file.substr(file.rfind('/') + 1) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
}

}  // namespace

std::string python_line() {
  if (Py_IsInitialized() == 0) return {};
  const pybind11::gil_scoped_acquire gil;
  pybind11::object frame = pybind11::reinterpret_borrow<pybind11::object>(
      reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get())));
  if (frame) frame.dec_ref();  // what PyThreadState_GetFrame returned was a new reference
  while (frame) {
    auto* const raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    if (std::string line = line_of(raw); !line.empty()) return line;
    frame = pybind11::reinterpret_steal<pybind11::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
  }
  return {};
}

}  // namespace simdevice
