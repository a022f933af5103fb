#pragma once

namespace simdevice {

/// Answers torch's questions about the accelerator: how many, whose memory is this, which generator.
void register_hooks();

}  // namespace simdevice
