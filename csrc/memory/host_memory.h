#pragma once

#include <cstdint>
#include <string>

namespace fold3d::memory {

/// Bytes that this process may still take of the host's memory: what the kernel calls available, and not more than its
/// control group's limit leaves. A large number where neither is known.
std::int64_t available_host_bytes();

/// "7.98 GB", for messages.
std::string size_text(std::int64_t bytes);

}  // namespace fold3d::memory
