#pragma once

#include <pybind11/pybind11.h>

namespace fold3d::bindings {

/// Adds Passage and the chain of seeds: what passing the blocks of a model needs of C++.
void bind_passage(pybind11::module_& module);

}  // namespace fold3d::bindings
