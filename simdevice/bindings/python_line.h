#pragma once

#include <string>

namespace simdevice {

/// Where the calling thread's Python program is, outside of torch: " at file.py:12"; empty without one (autograd's
/// threads).
std::string python_line();

}  // namespace simdevice
