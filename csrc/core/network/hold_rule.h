#pragma once

#include <algorithm>
#include <cstdint>

namespace fold3d::core {

/// When a slice of data-parallel traffic (DP.sync) may start, given pipeline messages (PP.sync) on the same
/// network card.
///
/// Pipeline messages go first: somebody computes next with what they carry, while gradients are needed only
/// at the end of the step. By the same rule a pipeline message waits for slices of TP.sync, with which its own stage
/// computes next, and so do slices of gradients. Patience is bounded on both sides, because a message may be held up by
/// its *receiver*, which does not use the network: a message holds slices back for at most `message_patience_ns` after
/// it was queued, and a slice waits for at most `slice_patience_ns` however many messages follow each other; both plus
/// twice the time that the largest pending message takes alone, where that is known, so that a slow network does not
/// turn patience into none. So data-parallel traffic always makes progress and the two kinds cannot deadlock. Pure: the
/// caller brings the time (nanoseconds of any one clock).
class HoldRule {
 public:
  struct Options {
    std::int64_t message_patience_ns = 5'000'000;
    std::int64_t slice_patience_ns = 20'000'000;
  };

  /// A transfer time beyond this is not believed: it comes from a measurement.
  static constexpr std::int64_t kLongestTransferNs = 5'000'000'000;

  /// Pipeline messages queued or under way on one side of a card.
  struct Pipeline {
    int pending = 0;
    std::int64_t newest_ns = 0;    ///< when the newest message was queued
    std::int64_t transfer_ns = 0;  ///< what the largest message takes alone since any was pending; 0: not known

    void begins(std::int64_t now_ns, std::int64_t message_ns) {
      transfer_ns = pending == 0 ? message_ns : std::max(transfer_ns, message_ns);
      newest_ns = now_ns;
      ++pending;
    }
    void ends() { --pending; }
  };

  HoldRule() = default;
  explicit HoldRule(const Options& options) : options_(options) {}

  /// The time before which a slice that has been ready since `ready_ns` should not start, unless the pipeline
  /// falls silent earlier; a time that is not in the future means now.
  std::int64_t start_ns(std::int64_t ready_ns, const Pipeline& pipeline) const {
    if (pipeline.pending == 0) return ready_ns;
    const std::int64_t transfers = 2 * std::clamp<std::int64_t>(pipeline.transfer_ns, 0, kLongestTransferNs);
    return transfers +
           std::min(ready_ns + options_.slice_patience_ns, pipeline.newest_ns + options_.message_patience_ns);
  }

 private:
  Options options_;
};

}  // namespace fold3d::core
