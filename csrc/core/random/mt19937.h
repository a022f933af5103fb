#pragma once

#include <cstdint>
#include <span>

namespace fold3d::core {

inline constexpr std::size_t kMt19937Words = 624;
inline constexpr std::size_t kMt19937Lanes = 8;  ///< states that are seeded together

/// Seeds mt19937 generators by the lower 32 bits of `seeds`, at most kMt19937Lanes, and writes the words of their
/// states (Matsumoto and Nishimura, "Mersenne Twister", 1998, in the seeding of 2002). One seeding is a chain of 623
/// dependent multiplications; several side by side take hardly longer than one.
void seed_mt19937(std::span<const std::uint64_t> seeds, std::span<std::uint32_t* const> states);

}  // namespace fold3d::core
