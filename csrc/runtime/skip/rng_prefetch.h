#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fold3d::runtime {

/// Gives every generator `seed`.
void reseed(const std::vector<at::Generator>& generators, std::uint64_t seed);

/// Whether anything was drawn from a generator since it was seeded last. Of a device that is neither the CPU nor CUDA
/// it is not known: false.
bool have_drawn(const std::vector<at::Generator>& generators);

/// A number that changes with every draw from one of the generators; of other devices it does not.
std::uint64_t draw_position(const std::vector<at::Generator>& generators);

/// Reseeds generators along the chain of seeds of skipped blocks. Most of the time that takes goes into the seeding of
/// the CPU's generator, so that is done for several blocks together. Used by one thread.
class RngPrefetch {
 public:
  /// `constants`: of the ends of the blocks; [0, end) will be skipped. Empty: nothing is known ahead.
  RngPrefetch(std::vector<std::uint64_t> constants, int end);

  /// Gives every generator `seed`, the chain's behind `block`: what reseed() does, and the same for the generators.
  void reseed(const std::vector<at::Generator>& generators, std::uint64_t seed, int block);

 private:
  bool prepare(std::uint64_t seed, int block);

  const std::vector<std::uint64_t> constants_;
  const int end_;
  bool useful_ = true;                        // what was prepared was what came
  std::size_t next_ = 0;                      // of states_
  std::vector<at::mt19937_data_pod> states_;  // of the seeds behind this block and the following
};

}  // namespace fold3d::runtime
