#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/skip/rng_prefetch.h"

namespace fold3d::runtime {

/// One forward of the model as one chunk: the blocks passed so far, and the seeds of random numbers on the way.
///
/// Every chunk passes all blocks in front of its own, and most passed blocks are skipped ones: this is the part of
/// passing them that need not be Python. Used by one thread.
class ForwardCursor {
 public:
  /// `lo`: the chunk's first block. `seed`: the first of the chain, given to the generators at once; none: the
  /// generators are left alone. `constants`: of the ends of the blocks, by which seeds are known ahead; may be empty.
  ForwardCursor(int lo, std::optional<std::uint64_t> seed, std::vector<at::Generator> generators,
                std::vector<std::uint64_t> constants = {});

  /// Blocks before `block` are none that skip() passes. At first that is block 0.
  void skip_from(int block) { from_ = block; }

  /// Passes `block` if it is the next one, in front of the chunk and in no unusual surroundings: under another grad
  /// mode than the forward or under hooks for saved tensors, such as those of a checkpoint. Reseeds as after it. False,
  /// with nothing changed: the caller has to look closer.
  bool skip(int block, std::uint64_t constant);

  /// Passes `block`; false if it is not the next one.
  bool enter(int block);

  /// Reseeds at the beginning of the module of `constant`. False inside of another module, whose own code it is: then
  /// nothing is reseeded, and it has no end. The chain does not move on, because skip() does without a beginning.
  bool begin_module(std::uint64_t constant);

  /// Reseeds at the end of the module of `constant` that began, where the chain moves on.
  void end_module(std::uint64_t constant);

  /// The module that began ends with an exception, which somebody may catch: as if it had not begun.
  void leave_module();

  int position() const { return position_; }     ///< the next block
  bool with_grad() const { return with_grad_; }  ///< whether the forward records for a backward

  /// Whether anything was drawn since the forward began; false where it leaves the generators alone.
  bool has_drawn() const { return seed_ && (has_drawn_ || have_drawn(generators_)); }

 private:
  const int lo_;
  int from_ = 0;
  const bool with_grad_;
  int position_ = 0;
  bool inside_ = false;
  bool has_drawn_ = false;  // before the generators were seeded last
  std::optional<std::uint64_t> seed_;
  std::vector<at::Generator> generators_;
  RngPrefetch ahead_;
};

}  // namespace fold3d::runtime
