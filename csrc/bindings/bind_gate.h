#pragma once

#include <pybind11/pybind11.h>

namespace fold3d::bindings {

/// Adds HostGate: what the runtime's objects share.
void bind_gate(pybind11::module_& module);

}  // namespace fold3d::bindings
