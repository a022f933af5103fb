#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "core/arbiter.h"

namespace fold3d::comm {

/// Where the reduce lane waits for pipeline messages to go first; how long is core::Arbiter's decision.
/// Thread-safe.
class PipelineGate {
 public:
  /// A pipeline message was queued, or is completely sent. Cheap: no lock unless the reduce lane waits.
  void queued();
  void sent();

  /// Blocks the reduce lane until its next chunk may start.
  void hold(const core::Arbiter& arbiter);

  /// Ends hold() and never blocks again (the communicator failed).
  void open();

 private:
  std::atomic<int> pending_{0};
  std::atomic<std::int64_t> newest_ns_{0};
  std::atomic<bool> holding_{false};
  std::atomic<bool> open_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace fold3d::comm
