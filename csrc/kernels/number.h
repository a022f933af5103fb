// Types of numbers as kernels see them, on both sides of nvcc.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/bfloat16.h"

namespace fold3d::kernels {

enum class Dtype : std::uint8_t { kFloat32, kFloat64, kBFloat16 };

/// The upper half of a float.
struct BFloat16 {
  std::uint16_t bits;
};

/// In what a stored number is computed with.
template <class Stored>
struct MathOf {
  using type = float;
};
template <>
struct MathOf<double> {
  using type = double;
};

FOLD3D_BOTH inline float load(BFloat16 stored) { return core::from_bfloat16(stored.bits); }
FOLD3D_BOTH inline float load(float stored) { return stored; }
FOLD3D_BOTH inline double load(double stored) { return stored; }

FOLD3D_BOTH inline void store(BFloat16& stored, float value) { stored.bits = core::to_bfloat16(value); }
FOLD3D_BOTH inline void store(float& stored, float value) { stored = value; }
FOLD3D_BOTH inline void store(double& stored, double value) { stored = value; }

FOLD3D_BOTH inline bool is_finite(double value) { return value - value == 0; }

}  // namespace fold3d::kernels
