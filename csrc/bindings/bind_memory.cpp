#include "bindings/bindings.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <vector>

#include "core/memory/memory_curve.h"
#include "core/memory/memory_model.h"
#include "core/sim/simulate.h"
#include "runtime/memory/cpu_bytes.h"

namespace py = pybind11;

namespace fold3d::bindings {

using core::ChunkBytes;
using core::MemoryModel;
using core::MemoryPoint;
using core::StageMemory;

void bind_memory(py::module_& module) {
  py::class_<ChunkBytes>(module, "ChunkBytes", "What a chunk needs, in bytes.")
      .def(py::init<>())
      .def_readwrite("weights", &ChunkBytes::weights)
      .def_readwrite("gradients", &ChunkBytes::gradients)
      .def_readwrite("optimizer", &ChunkBytes::optimizer)
      .def_readwrite("inputs", &ChunkBytes::inputs)
      .def_readwrite("saved", &ChunkBytes::saved)
      .def_readwrite("kept", &ChunkBytes::kept)
      .def_readwrite("forward", &ChunkBytes::forward)
      .def_readwrite("backward", &ChunkBytes::backward);
  py::class_<MemoryModel>(module, "MemoryModel", "What the stages of a replica need.")
      .def(py::init<>())
      .def_readwrite("chunks", &MemoryModel::chunks)
      .def_readwrite("fixed", &MemoryModel::fixed)
      .def_readwrite("update", &MemoryModel::update)
      .def_readwrite("gradients_stay", &MemoryModel::gradients_stay)
      .def_readwrite("receive_ahead", &MemoryModel::receive_ahead);
  py::class_<MemoryPoint>(module, "MemoryPoint", "Bytes of a stage from a moment on.")
      .def_readonly("time_ns", &MemoryPoint::time_ns)
      .def_readonly("uses", &MemoryPoint::uses)
      .def_readonly("pool", &MemoryPoint::pool)
      .def_property_readonly("device", &MemoryPoint::device);
  py::class_<StageMemory>(module, "StageMemory", "Bytes of a stage over a step.")
      .def_readonly("points", &StageMemory::points)
      .def_readonly("peak", &StageMemory::peak)
      .def_readonly("most_pool", &StageMemory::most_pool);
  module.def("memory_use_names", [] { return core::kMemoryUseNames; });
  module.def(
      "memory_curves",
      [](const core::Schedule& schedule, const MemoryModel& model, const core::TrainingStep& step) {
        return core::memory_curves(schedule, model, core::compute_times(step, schedule.shape));
      },
      py::arg("schedule"), py::arg("model"), py::arg("step"), py::call_guard<py::gil_scoped_release>());
  module.def("count_cpu_bytes", &runtime::count_cpu_bytes, py::arg("on"));
  module.def("live_cpu_bytes", &runtime::live_cpu_bytes);
  module.def("peak_cpu_bytes", &runtime::peak_cpu_bytes);
  module.def("reset_peak_cpu_bytes", &runtime::reset_peak_cpu_bytes);
  module.def("is_counted", &runtime::is_counted, py::arg("tensor"));
}

}  // namespace fold3d::bindings
