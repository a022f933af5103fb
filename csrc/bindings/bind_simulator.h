#pragma once

#include <pybind11/pybind11.h>

namespace fold3d::bindings {

/// Adds the simulator of training steps: ClusterModel, TrainingStep and simulate_training. Times in nanoseconds.
void bind_simulator(pybind11::module_& module);

}  // namespace fold3d::bindings
