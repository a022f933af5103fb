#include <gtest/gtest.h>

#include <array>
#include <random>
#include <sstream>
#include <vector>

#include "core/random/mt19937.h"

namespace fold3d::core {
namespace {

using Words = std::array<std::uint32_t, kMt19937Words>;

/// The standard library's state after the same seeding: it prints its words and its position.
Words expected_words(std::uint64_t seed) {
  std::stringstream text;
  text << std::mt19937(static_cast<std::uint32_t>(seed));
  Words words{};
  for (std::uint32_t& word : words) text >> word;
  return words;
}

void expect_states_of(const std::vector<std::uint64_t>& seeds) {
  std::vector<Words> words(seeds.size());
  std::vector<std::uint32_t*> states;
  for (Words& one : words) states.push_back(one.data());
  seed_mt19937(seeds, states);
  for (std::size_t k = 0; k < seeds.size(); ++k) EXPECT_EQ(words[k], expected_words(seeds[k])) << "seed " << seeds[k];
}

TEST(Mt19937, SeedsAsTheStandardLibraryDoes) {
  expect_states_of({0, 1, 5489, 0xFFFFFFFF, 0x80000000, 123456789, 7, 19650218});
}

TEST(Mt19937, UsesTheLowerHalfOfASeed) { expect_states_of({0xF01D5EEDE31428F0, 0xFFFFFFFFFFFFFFFF}); }

TEST(Mt19937, SeedsFewerThanAllLanes) {
  expect_states_of({42});
  expect_states_of({});
}

TEST(Mt19937, RefusesMoreSeedsThanLanesOrThanStates) {
  const std::vector<std::uint64_t> seeds(kMt19937Lanes + 1);
  std::vector<Words> words(seeds.size());
  std::vector<std::uint32_t*> states;
  for (Words& one : words) states.push_back(one.data());
  EXPECT_THROW(seed_mt19937(seeds, states), std::invalid_argument);
  EXPECT_THROW(seed_mt19937(std::span(seeds).first(3), std::span(states).first(2)), std::invalid_argument);
}

}  // namespace
}  // namespace fold3d::core
