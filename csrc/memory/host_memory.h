#pragma once

#include <cstdint>
#include <string>

namespace fold3d::memory {

/// Bytes that this process may still take of the host's memory: what the kernel calls available, and not more than the
/// limits of its control group, of either version, and of those around it leave. Cached files count as available in
/// both. A large number where nothing is known. `root`: of the file system that tells.
std::int64_t available_host_bytes(const std::string& root = "");

/// "7.98 GB", for messages.
std::string size_text(std::int64_t bytes);

}  // namespace fold3d::memory
