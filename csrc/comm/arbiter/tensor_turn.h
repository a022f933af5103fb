#pragma once

#include <cstddef>

#include "comm/arbiter/nic_arbiter.h"

namespace fold3d::comm {

/// TP.sync's turn on the card, in one direction: messages and slices of the host yield to it. Nothing for what stays
/// within the host. Used by one thread.
class TensorTurn {
 public:
  TensorTurn(NicArbiter& arbiter, NicArbiter::Direction direction, bool uses_card)
      : arbiter_(uses_card ? &arbiter : nullptr), direction_(direction) {}
  ~TensorTurn() { leave(); }
  TensorTurn(const TensorTurn&) = delete;
  TensorTurn& operator=(const TensorTurn&) = delete;

  /// `bytes` travel next. Follows an earlier turn without a gap into which something else could slip.
  void take(std::size_t bytes) {
    if (arbiter_ == nullptr) return;
    arbiter_->tensor_begins(direction_, bytes);
    leave();
    taken_ = true;
  }

  /// There is nothing to travel for now.
  void leave() {
    if (taken_) arbiter_->tensor_ends(direction_);
    taken_ = false;
  }

 private:
  NicArbiter* const arbiter_;
  const NicArbiter::Direction direction_;
  bool taken_ = false;
};

}  // namespace fold3d::comm
