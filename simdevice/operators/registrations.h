#pragma once

namespace simdevice {

/// Registers run_on_stream() for each operator that has a CPU kernel, also where torch would take it apart into others:
/// those parts have other arithmetic than the CPU kernel. Views, factories and what has a kernel here are left out.
/// Returns how many; to be called once.
int register_operators();

}  // namespace simdevice
