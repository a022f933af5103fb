#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fold3d::bindings {

/// RingLinks and BucketSync. After HostGate and CommError.
void bind_bucket_sync(pybind11::module_& module);

}  // namespace fold3d::bindings
