#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

#include "simdevice/core/runtime.h"

namespace simdevice {

/// Says how much memory a device has; more in use than that is torch's OutOfMemoryError.
void set_device_bytes(std::size_t bytes);

/// Memory on the current stream of the current device.
c10::DataPtr allocate_on_device(std::size_t bytes);

/// The block behind memory of the simulated device or pinned for it; null: other memory.
Block* block_of(const c10::DataPtr& data);

/// Makes them torch's for this device.
void register_allocators();

}  // namespace simdevice
