#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/bucket/collective_stream.h"
#include "comm/ring/ring.h"

namespace fold3d::comm {

/// DP.sync's collectives of one kind, in host memory, around a ring of replicas. Shard k is summed from replica k + 1
/// around the ring to its owner k, whose addition comes last and multiplies by the scale.
///
/// A ring may be several lines, each with threads of its own: where one socket's buffer holds less than is on its way
/// on a fast link with a long round trip, a bucket is cut over them (Share), which changes no bit.
class CollectiveRing final : public CollectiveStream, private Ring::Listener {
 public:
  /// `lines`: at least one, the same number on all replicas. Throws std::invalid_argument for options out of range.
  CollectiveRing(const Ring::Options& options, std::vector<std::shared_ptr<RingConnection>> lines,
                 const std::shared_ptr<NicArbiter>& arbiter);
  ~CollectiveRing() override { stop(); }

  void start(CollectiveStream::Listener& listener) override;
  void push(Collective collective) override;
  void abort(const std::string& reason) noexcept override;
  void stop() noexcept override;
  std::string waits_for() const override;

 private:
  /// A collective of which some shares are under way.
  struct Whole {
    std::shared_ptr<Buffer> buffer;
    int left = 0;  // shares, guarded by mutex_ as the record
    CollectiveRecord record;
  };

  void completed(const Ring::Record& record, const std::shared_ptr<void>& keep) override;
  void failed(Failure::Kind kind, const std::string& text) override { listener_->failed(kind, text); }

  const int rank_, size_;
  const NicArbiter::Traffic traffic_;
  CollectiveStream::Listener* listener_ = nullptr;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Ring>> rings_;
};

}  // namespace fold3d::comm
