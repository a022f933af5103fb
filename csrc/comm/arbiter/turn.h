#pragma once

#include <cstddef>

#include "comm/arbiter/nic_arbiter.h"

namespace fold3d::comm {

/// A turn on the card of traffic to which other traffic of the host yields: of TP.sync in either direction, of
/// the first kind of DP.sync that is sent (NicArbiter::first). Nothing for other traffic, nor for what stays within the
/// host. Used by one thread.
class Turn {
 public:
  Turn(NicArbiter& arbiter, NicArbiter::Traffic traffic, NicArbiter::Direction direction, bool uses_card)
      : arbiter_(uses_card && is_announced(arbiter, traffic, direction) ? &arbiter : nullptr),
        traffic_(traffic),
        direction_(direction) {}
  ~Turn() { leave(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  /// `bytes` travel next. Follows an earlier turn without a gap into which something else could slip.
  void take(std::size_t bytes) {
    if (arbiter_ == nullptr) return;
    if (traffic_ == NicArbiter::Traffic::kTensor) {
      arbiter_->tensor_begins(direction_, bytes);
    } else {
      arbiter_->slice_begins(bytes);
    }
    leave();
    taken_ = true;
  }

  /// There is nothing to travel for now.
  void leave() {
    if (!taken_) return;
    taken_ = false;
    if (traffic_ == NicArbiter::Traffic::kTensor) {
      arbiter_->tensor_ends(direction_);
    } else {
      arbiter_->slice_ends();
    }
  }

 private:
  static bool is_announced(const NicArbiter& arbiter, NicArbiter::Traffic traffic, NicArbiter::Direction direction) {
    if (traffic == arbiter.first()) return direction == NicArbiter::Direction::kSend;
    return traffic == NicArbiter::Traffic::kTensor;
  }

  NicArbiter* const arbiter_;
  const NicArbiter::Traffic traffic_;
  const NicArbiter::Direction direction_;
  bool taken_ = false;
};

}  // namespace fold3d::comm
