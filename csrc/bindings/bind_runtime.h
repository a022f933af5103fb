#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fold3d::bindings {

/// Executor and its error type.
void bind_runtime(pybind11::module_& module);

}  // namespace fold3d::bindings
