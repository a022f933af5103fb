#pragma once

#include <ATen/core/Generator.h>

#include <optional>

namespace simdevice {

/// The generator of a device that torch uses unless told otherwise.
const at::Generator& default_generator(int device);

at::Generator new_generator(int device);

/// A CPU generator for one launch, seeded by the next number of `given`, else of the device's own: so numbers depend on
/// the order of launches and on nothing else, as on CUDA. A CPU generator is returned as it is.
at::Generator launch_generator(const std::optional<at::Generator>& given, int device);

}  // namespace simdevice
