#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "runtime/skip/forward_cursor.h"

namespace fold3d::bindings {

/// What the forwards of a model's blocks look at: the cursor under way, if there is one.
struct CurrentForward {
  runtime::ForwardCursor* cursor = nullptr;
  pybind11::object keeps;     ///< the owner of `cursor`
  pybind11::object received;  ///< what skipped blocks return
};

/// Adds CurrentForward, BlockForward and block_forward().
void bind_block_forward(pybind11::module_& module);

}  // namespace fold3d::bindings
