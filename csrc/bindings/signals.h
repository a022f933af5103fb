#pragma once

#include <pybind11/pybind11.h>

namespace fold3d::bindings {

/// Runs Python's handlers of the signals that came while the calling thread waited without the GIL; throws what they
/// raise, such as KeyboardInterrupt. Does nothing on threads other than Python's main thread.
inline void handle_signals() {
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

}  // namespace fold3d::bindings
