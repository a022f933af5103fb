// fold3d._C: table of contents, and what was built.
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "bindings/bindings.h"
#include "bindings/block_forward.h"
#include "bindings/operator_run.h"
#include "runtime/kernels/kernel_ops.h"

namespace py = pybind11;

namespace {

py::dict built_with() {
  py::dict out;
  out["torch"] = TORCH_VERSION;
  out["compiler"] = __VERSION__;
#ifdef FOLD3D_CUDA_KERNELS
  out["nvcc"] = FOLD3D_CUDA_KERNELS;
#else
  out["nvcc"] = py::none();
#endif
  return out;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "fold3d's C++ part: schedules, the executor and the communicator.";
  module.def("built_with", &built_with,
             "Versions: of torch, of the C++ compiler, of nvcc (None: without CUDA kernels).");
  module.def(
      "has_kernels",
      [](const py::object& device) { return fold3d::runtime::has_kernels(py::cast<c10::Device>(device)); },
      py::arg("device"), "Whether the kernels of csrc/kernels run on this device.");
  fold3d::bindings::bind_core(module);
  fold3d::bindings::bind_forward_cursor(module);
  fold3d::bindings::bind_block_forward(module);
  fold3d::bindings::bind_operator_run(module);
  fold3d::bindings::bind_nic_arbiter(module);  // before those whose signatures name it
  fold3d::bindings::bind_tcp_peers(module);
  fold3d::bindings::bind_stream_clock(module);
  fold3d::bindings::bind_offload(module);
  fold3d::bindings::bind_runtime(module);
  fold3d::bindings::bind_bucket_sync(module);
  fold3d::bindings::bind_tensor_sync(module);
  fold3d::bindings::bind_simulator(module);
  fold3d::bindings::bind_rivals(module);
  fold3d::bindings::bind_plan(module);  // after Schedule and TrainingStep
}
