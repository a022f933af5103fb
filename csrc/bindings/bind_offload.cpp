#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <string>

#include "bindings/bindings.h"
#include "memory/host_memory.h"
#include "memory/tier.h"
#include "runtime/offload/offloader.h"
#include "runtime/offload/stash_batch.h"

namespace py = pybind11;

namespace fold3d::bindings {

using runtime::OffloadCounters;
using runtime::OffloadOptions;
using runtime::SavedTensor;
using runtime::StashBatch;

void bind_offload(py::module_& module) {
  py::register_exception<memory::PoolError>(module, "PoolError", PyExc_RuntimeError);
  py::class_<SavedTensor>(module, "SavedTensor", "What a graph keeps of a tensor; its memory may be away.")
      .def_property_readonly("moves", &SavedTensor::moves);
  py::class_<StashBatch, std::shared_ptr<StashBatch>>(module, "StashBatch", "What one stash saves and moves.")
      .def(py::init([] { return std::make_shared<StashBatch>(std::make_shared<runtime::Staying>()); }))
      .def("save", &StashBatch::save, py::arg("tensor"), "A pack hook of torch.autograd.graph.saved_tensors_hooks.");
  module.def("unpack_saved", &SavedTensor::tensor, py::arg("saved"),
             "The unpack hook of what StashBatch.save returns.");
  py::class_<OffloadOptions>(module, "OffloadOptions", "How stashes leave the device.")
      .def(py::init([](std::int64_t pool_bytes, const std::string& disk, double bytes_per_second) {
             return OffloadOptions{.pool_bytes = pool_bytes, .disk = disk, .bytes_per_second = bytes_per_second};
           }),
           py::arg("pool_bytes") = 0, py::arg("disk") = "", py::arg("bytes_per_second") = 0.0,
           "`pool_bytes`: reserved at once; 0: what the first step asks for. `disk`: folder; empty: host memory. "
           "`bytes_per_second`: copies take as long as at this rate, both directions together; 0: as long as they do.");
  py::class_<OffloadCounters>(module, "OffloadCounters", "Bytes of stashes on both sides.")
      .def_readonly("device_bytes", &OffloadCounters::device_bytes)
      .def_readonly("device_peak", &OffloadCounters::device_peak)
      .def_readonly("pool_bytes", &OffloadCounters::pool_bytes)
      .def_readonly("pool_in_use", &OffloadCounters::pool_in_use)
      .def_readonly("pool_peak", &OffloadCounters::pool_peak)
      .def_readonly("late", &OffloadCounters::late);
  module.def("available_host_bytes", &memory::available_host_bytes, "What the host, or the control group, has left.");
}

}  // namespace fold3d::bindings
