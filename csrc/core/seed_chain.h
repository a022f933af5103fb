#pragma once

#include <cstdint>

namespace fold3d::core {

/// The upper 16 bits of every seed of a chain, by which a generator that carries one is known.
inline constexpr std::uint64_t kSeedMark = 0xF01D;

/// Whether `seed` is of a chain.
inline bool is_chained(std::uint64_t seed) { return seed >> 48 == kSeedMark; }

/// The seed that follows `seed` in the chain at the module of `constant`: the finaliser of splitmix64 (Steele, Lea and
/// Flood 2014), marked. CPU generators use the lower 32 bits only.
inline std::uint64_t next_seed(std::uint64_t seed, std::uint64_t constant) {
  std::uint64_t x = (seed ^ constant) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return kSeedMark << 48 | ((x ^ (x >> 31)) & ((std::uint64_t{1} << 48) - 1));
}

}  // namespace fold3d::core
