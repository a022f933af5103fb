// What module.cpp puts together; each is in the .cpp of its name.
#pragma once

#include <pybind11/pybind11.h>

namespace fold3d::bindings {

/// Adds everything of csrc/core to the module: Kind, Action, Schedule and the functions over them.
/// std::invalid_argument becomes ValueError.
void bind_core(pybind11::module_& module);

/// Adds ForwardCursor and the chain of seeds: what passing the blocks of a model needs of C++.
void bind_forward_cursor(pybind11::module_& module);

/// Adds NicArbiter: what the runtime's objects share.
void bind_nic_arbiter(pybind11::module_& module);

/// Adds TcpPeers: what the executor's messages travel over in host memory.
void bind_tcp_peers(pybind11::module_& module);

/// StreamClock and Moment. Before those whose signatures name them.
void bind_stream_clock(pybind11::module_& module);

/// StashBatch and what it saves, OffloadOptions and OffloadCounters. Before the Executor.
void bind_offload(pybind11::module_& module);

/// Executor and its error type, and the count of what CPU tensors hold.
void bind_runtime(pybind11::module_& module);

/// RingPeers and BucketSync. After NicArbiter and CommError.
void bind_bucket_sync(pybind11::module_& module);

/// TensorSync, and the operators torch.ops.fold3d.tp_*. After RingPeers.
void bind_tensor_sync(pybind11::module_& module);

/// Adds the simulator of training steps (ClusterModel, TrainingStep, simulate_step) and their memory (MemoryModel,
/// memory_curves). Times in nanoseconds.
void bind_simulator(pybind11::module_& module);

/// Adds what other planners would choose (csrc/core/rivals).
void bind_rivals(pybind11::module_& module);

/// Adds the planner (PlanJob, PlanSpace, search_plans). After the simulator, whose results its signatures name.
void bind_plan(pybind11::module_& module);

}  // namespace fold3d::bindings
