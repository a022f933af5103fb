#pragma once

#include <memory>
#include <string>

#include "comm/bucket/collective_stream.h"
#include "comm/ring/ring.h"

namespace fold3d::comm {

/// DP.sync's collectives of one kind, in host memory, over a Ring of replicas. Shard k is summed from replica k + 1
/// around the ring to its owner k, whose addition comes last and multiplies by the scale.
class CollectiveRing final : public CollectiveStream, private Ring::Listener {
 public:
  /// Throws std::invalid_argument for options out of range.
  CollectiveRing(const Ring::Options& options, std::shared_ptr<RingConnection> connection,
                 std::shared_ptr<NicArbiter> arbiter);

  void start(CollectiveStream::Listener& listener) override;
  void push(Collective collective) override;
  void abort(const std::string& reason) noexcept override { ring_.abort(reason); }
  void stop() noexcept override { ring_.stop(); }
  std::string waits_for() const override;

 private:
  void completed(const Ring::Record& record) override;
  void failed(Failure::Kind kind, const std::string& text) override { listener_->failed(kind, text); }

  const int rank_, size_;
  const NicArbiter::Traffic traffic_;
  CollectiveStream::Listener* listener_ = nullptr;
  Ring ring_;
};

}  // namespace fold3d::comm
