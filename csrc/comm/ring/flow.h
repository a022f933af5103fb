#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/arbiter/nic_arbiter.h"
#include "comm/ring/credits.h"
#include "comm/ring/ring_connection.h"

namespace fold3d::comm {

/// What one line of DP.sync sends: the speed of all lines decides about slices and buffers (Credits), and where they go
/// through the card the arbiter hears of it; this line's own decides how much may be on its way to the next member
/// (FlightLimit). Sender's thread.
class Flow {
 public:
  Flow(std::shared_ptr<Credits> credits, std::shared_ptr<RingConnection> connection,
       std::shared_ptr<NicArbiter> arbiter, bool uses_card);

  /// A slice is about to be sent; it is in the system's buffer.
  void begins();
  void ends(std::size_t bytes);

  std::size_t slice_bytes() const { return credits_->slice_bytes(); }
  /// How many bytes the next member is to let come at once; 0: as many as the system likes.
  std::uint64_t window() const { return window_; }

 private:
  const std::shared_ptr<Credits> credits_;
  const std::shared_ptr<RingConnection> connection_;
  const std::shared_ptr<NicArbiter> arbiter_;
  const bool uses_card_;
  BandwidthMeter own_;
  FlightLimit flight_;
  std::int64_t urgent_ = 0;  // how often something more urgent wanted the card
  std::uint64_t window_ = 0;
};

}  // namespace fold3d::comm
