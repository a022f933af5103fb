// What module.cpp puts together; each is in the .cpp of its name.
#pragma once

#include <pybind11/pybind11.h>

namespace fold3d::bindings {

/// Adds everything of csrc/core to the module: Kind, Action, Schedule and the functions over them.
/// std::invalid_argument becomes ValueError.
void bind_core(pybind11::module_& module);

/// Adds Passage and the chain of seeds: what passing the blocks of a model needs of C++.
void bind_passage(pybind11::module_& module);

/// Adds HostGate: what the runtime's objects share.
void bind_gate(pybind11::module_& module);

/// Adds TcpLinks: what the executor's messages travel over in host memory.
void bind_tcp_links(pybind11::module_& module);

/// Executor and its error type.
void bind_runtime(pybind11::module_& module);

/// RingLinks and BucketSync. After HostGate and CommError.
void bind_bucket_sync(pybind11::module_& module);

/// Adds the simulator of training steps: ClusterModel, TrainingStep and simulate_training. Times in nanoseconds.
void bind_simulator(pybind11::module_& module);

}  // namespace fold3d::bindings
