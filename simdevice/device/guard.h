#pragma once

namespace simdevice {

/// Makes streams, events and the current device known to c10's device-generic guards.
void register_guard();

}  // namespace simdevice
