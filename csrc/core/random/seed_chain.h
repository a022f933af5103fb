#pragma once

#include <cstdint>

namespace fold3d::core {

/// The upper 16 bits of the seeds of a chain, by which a generator that carries one is known: between modules, and
/// inside of one.
inline constexpr std::uint64_t kBetweenMark = 0xF01D, kInsideMark = 0xF01E;

/// 48 bits of `seed` and `constant`: the finaliser of splitmix64 (Steele, Lea and Flood 2014). CPU generators use the
/// lower 32 bits only.
inline std::uint64_t mixed(std::uint64_t seed, std::uint64_t constant) {
  std::uint64_t x = (seed ^ constant) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return (x ^ (x >> 31)) & ((std::uint64_t{1} << 48) - 1);
}

/// The seed that follows `seed` in the chain, behind the module of `constant`.
inline std::uint64_t next_seed(std::uint64_t seed, std::uint64_t constant) {
  return kBetweenMark << 48 | mixed(seed, constant);
}

/// The seed inside of the module of `constant`, which follows `seed`; no part of the chain.
inline std::uint64_t seed_inside(std::uint64_t seed, std::uint64_t constant) {
  return kInsideMark << 48 | mixed(seed, constant);
}

/// Whether `seed` is of a chain, between two modules.
inline bool is_between(std::uint64_t seed) { return seed >> 48 == kBetweenMark; }

}  // namespace fold3d::core
