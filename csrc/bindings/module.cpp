// fold3d._C: table of contents.
#include "bindings/bindings.h"
#include "bindings/block_forward.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "fold3d's C++ part: schedules, the executor and the communicator.";
  fold3d::bindings::bind_core(module);
  fold3d::bindings::bind_forward_cursor(module);
  fold3d::bindings::bind_block_forward(module);
  fold3d::bindings::bind_nic_arbiter(module);  // before those whose signatures name it
  fold3d::bindings::bind_tcp_peers(module);
  fold3d::bindings::bind_offload(module);
  fold3d::bindings::bind_runtime(module);
  fold3d::bindings::bind_bucket_sync(module);
  fold3d::bindings::bind_tensor_sync(module);
  fold3d::bindings::bind_simulator(module);
}
