#pragma once

#include <pybind11/pybind11.h>

namespace fold3d::bindings {

/// Adds everything of csrc/core to the module: Kind, Action, Schedule and the functions over them.
/// std::invalid_argument becomes ValueError.
void bind_core(pybind11::module_& module);

}  // namespace fold3d::bindings
