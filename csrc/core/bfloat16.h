// Conversions of bfloat16, the upper half of a float; for nvcc, too.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define FOLD3D_BOTH __host__ __device__
#else
#define FOLD3D_BOTH
#endif

namespace fold3d::core {

FOLD3D_BOTH inline float from_bfloat16(std::uint16_t stored) {
  const std::uint32_t word = static_cast<std::uint32_t>(stored) << 16;
  float value;
  memcpy(&value, &word, sizeof value);
  return value;
}

/// Rounds to the nearest, ties to even, as torch does; no number stays none.
FOLD3D_BOTH inline std::uint16_t to_bfloat16(float value) {
  if (value != value) return 0x7FC0;
  std::uint32_t word;
  memcpy(&word, &value, sizeof word);
  return static_cast<std::uint16_t>((word + 0x7FFFu + ((word >> 16) & 1u)) >> 16);
}

}  // namespace fold3d::core
