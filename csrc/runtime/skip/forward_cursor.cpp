#include "runtime/skip/forward_cursor.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "core/random/seed_chain.h"

namespace fold3d::runtime {

ForwardCursor::ForwardCursor(int lo, std::optional<std::uint64_t> seed, std::vector<at::Generator> generators,
                             std::vector<std::uint64_t> constants)
    : lo_(lo),
      with_grad_(c10::GradMode::is_enabled()),
      seed_(seed),
      generators_(std::move(generators)),
      ahead_(std::move(constants), lo) {
  if (seed_) reseed(generators_, *seed_);
}

bool ForwardCursor::skip(int block, std::uint64_t constant) {
  if (block >= lo_ || block < from_ || block != position_ || c10::GradMode::is_enabled() != with_grad_ ||
      !at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) {
    return false;
  }
  ++position_;
  inside_ = false;  // as at the end of a block that ran, also where a module around the blocks calls them
  if (!seed_) return true;
  has_drawn_ = has_drawn();
  seed_ = core::next_seed(*seed_, constant);
  ahead_.reseed(generators_, *seed_, block);
  return true;
}

bool ForwardCursor::enter(int block) {
  if (block != position_) return false;
  ++position_;
  return true;
}

bool ForwardCursor::begin_module(std::uint64_t constant) {
  if (inside_) return false;
  inside_ = true;
  has_drawn_ = has_drawn();
  if (seed_) reseed(generators_, core::seed_inside(*seed_, constant));
  return true;
}

void ForwardCursor::leave_module() {
  inside_ = false;
  has_drawn_ = has_drawn();
  if (seed_) reseed(generators_, *seed_);
}

void ForwardCursor::end_module(std::uint64_t constant) {
  inside_ = false;
  if (!seed_) return;
  has_drawn_ = has_drawn();
  seed_ = core::next_seed(*seed_, constant);
  reseed(generators_, *seed_);
}

}  // namespace fold3d::runtime
