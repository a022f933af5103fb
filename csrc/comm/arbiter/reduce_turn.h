#pragma once

#include <cstddef>

#include "comm/arbiter/nic_arbiter.h"

namespace fold3d::comm {

/// A reduce-scatter's turn on the card: gathers of the host yield to it. Nothing for a gather, nor for what stays
/// within the host. Used by one thread.
class ReduceTurn {
 public:
  ReduceTurn(NicArbiter& arbiter, NicArbiter::Traffic traffic, bool uses_card)
      : arbiter_(uses_card && traffic == NicArbiter::Traffic::kReduce ? &arbiter : nullptr) {}
  ~ReduceTurn() { leave(); }
  ReduceTurn(const ReduceTurn&) = delete;
  ReduceTurn& operator=(const ReduceTurn&) = delete;

  /// `bytes` are sent next. Follows an earlier turn without a gap into which a gather could slip.
  void take(std::size_t bytes) {
    if (arbiter_ == nullptr) return;
    arbiter_->reduce_begins(bytes);
    leave();
    taken_ = true;
  }

  /// There is nothing to send for now.
  void leave() {
    if (taken_) arbiter_->reduce_ends();
    taken_ = false;
  }

 private:
  NicArbiter* const arbiter_;
  bool taken_ = false;
};

}  // namespace fold3d::comm
