#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "simdevice/core/runtime.h"

namespace simdevice {

/// The calling thread's device.
int current_device();
/// Throws c10::Error for a device that there is not.
void set_current_device(int device);

/// The calling thread's stream of a device; -1: of its current one.
Stream* current_stream(int device = -1);
/// Makes it the calling thread's stream of its device; returns what was.
Stream* exchange_current_stream(Stream* stream);

Stream* stream_of(const c10::Stream& stream);
c10::Stream as_c10(const Stream* stream);

/// The index of a device, or the current one's if it names none.
int index_of(const c10::Device& device);
c10::Device device_at(int index);

}  // namespace simdevice
