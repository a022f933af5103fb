#include "core/random/mt19937.h"

#include <algorithm>
#include <array>
#include <stdexcept>

namespace fold3d::core {

void seed_mt19937(std::span<const std::uint64_t> seeds, std::span<std::uint32_t* const> states) {
  if (seeds.size() > kMt19937Lanes || states.size() != seeds.size()) {
    throw std::invalid_argument("seed_mt19937: as many states as seeds, and no more than are seeded together");
  }
  std::array<std::uint32_t, kMt19937Lanes> words{};  // lanes without a seed are computed for nothing
  std::transform(seeds.begin(), seeds.end(), words.begin(),
                 [](std::uint64_t seed) { return static_cast<std::uint32_t>(seed); });
  for (std::uint32_t k = 0; k < kMt19937Words; ++k) {
    for (std::size_t lane = 0; k > 0 && lane < words.size(); ++lane) {
      words[lane] = 1812433253u * (words[lane] ^ (words[lane] >> 30)) + k;
    }
    for (std::size_t lane = 0; lane < states.size(); ++lane) states[lane][k] = words[lane];
  }
}

}  // namespace fold3d::core
