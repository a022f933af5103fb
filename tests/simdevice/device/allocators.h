#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

#include "simdevice/core/runtime.h"

namespace simdevice {

/// Memory on the current stream of the current device.
c10::DataPtr allocate_on_device(std::size_t bytes);

/// The block behind memory of the simulated device or pinned for it; null: other memory.
Block* block_of(const c10::DataPtr& data);

/// Makes them torch's for this device.
void register_allocators();

}  // namespace simdevice
