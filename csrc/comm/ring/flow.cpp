#include "comm/ring/flow.h"

#include <algorithm>
#include <utility>

#include "comm/base/clock.h"

namespace fold3d::comm {
namespace {

constexpr std::size_t kMostAtOnce = 64u << 10;  // a packet of the system's

}  // namespace

Flow::Flow(std::shared_ptr<Credits> credits, std::shared_ptr<RingConnection> connection,
           std::shared_ptr<NicArbiter> arbiter, bool uses_card)
    : credits_(std::move(credits)),
      connection_(std::move(connection)),
      arbiter_(std::move(arbiter)),
      uses_card_(uses_card) {}

void Flow::begins() {
  own_.begins(now_ns(), connection_->queue());
  credits_->begins();
}

void Flow::ends(std::size_t bytes) {
  const bool window_ended = own_.ends(now_ns(), bytes, connection_->queue());
  credits_->ends(bytes);
  const double bandwidth = credits_->bandwidth();
  if (bandwidth == 0.0) return;
  if (uses_card_) arbiter_->set_bandwidth(bandwidth);  // else it is not the card's
  if (!window_ended) return;
  const NicArbiter::Counters counters = arbiter_->counters();
  const std::int64_t urgent = counters.messages + counters.preemptions;
  flight_.measured(own_.last(), urgent == urgent_);
  urgent_ = urgent;
  window_ = flight_.bytes(own_.bandwidth(), connection_->round_trip_seconds());
  connection_->limit_waiting(credits_->waiting_bytes(), std::min(credits_->slice_bytes(), kMostAtOnce));
}

}  // namespace fold3d::comm
