#pragma once

#include <cstddef>

#include "comm/arbiter/host_gate.h"

namespace fold3d::comm {

/// A reduce-scatter's turn on the card: gathers of the host yield to it. Nothing for a gather, nor for what stays
/// within the host. Used by one thread.
class ReduceTurn {
 public:
  ReduceTurn(HostGate& gate, HostGate::Traffic traffic, bool uses_card)
      : gate_(uses_card && traffic == HostGate::Traffic::kReduce ? &gate : nullptr) {}
  ~ReduceTurn() { leave(); }
  ReduceTurn(const ReduceTurn&) = delete;
  ReduceTurn& operator=(const ReduceTurn&) = delete;

  /// `bytes` are sent next. Follows an earlier turn without a gap into which a gather could slip.
  void take(std::size_t bytes) {
    if (gate_ == nullptr) return;
    gate_->reduce_begins(bytes);
    leave();
    taken_ = true;
  }

  /// There is nothing to send for now.
  void leave() {
    if (taken_) gate_->reduce_ends();
    taken_ = false;
  }

 private:
  HostGate* const gate_;
  bool taken_ = false;
};

}  // namespace fold3d::comm
