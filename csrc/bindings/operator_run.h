// Which operators of torch run on a thread, for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace fold3d::bindings {

/// Adds NumberSet, OperatorRun and what swaps one in.
void bind_operator_run(pybind11::module_& module);

}  // namespace fold3d::bindings
