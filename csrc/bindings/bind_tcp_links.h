#pragma once

#include <pybind11/pybind11.h>

namespace fold3d::bindings {

/// Adds TcpLinks: what the executor's messages travel over in host memory.
void bind_tcp_links(pybind11::module_& module);

}  // namespace fold3d::bindings
