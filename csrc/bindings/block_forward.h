#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "runtime/skip/passage.h"

namespace fold3d::bindings {

/// What the forwards of a model's blocks look at: the passage under way, if there is one.
struct PassageSlot {
  runtime::Passage* passage = nullptr;
  pybind11::object keeps;     ///< the owner of `passage`
  pybind11::object received;  ///< what skipped blocks return
};

/// Adds PassageSlot, BlockForward and block_forward().
void bind_block_forward(pybind11::module_& module);

}  // namespace fold3d::bindings
