// AbortableWorks: waits for c10d works that another thread can end.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <mutex>
#include <string>
#include <vector>

namespace fold3d::runtime {

/// Point-to-point works under way on one or more threads. Thread-safe.
class AbortableWorks {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;

  /// Blocks until the work is complete (on CUDA: until the current stream waits for it). Throws AbortedError after
  /// abort(), else what went wrong with the work.
  void wait(const Work& work);
  /// Throws AbortedError after abort().
  void check() const;
  /// Ends all waits, now and later. Idempotent, the first reason stays.
  void abort(const std::string& reason) noexcept;

 private:
  mutable std::mutex mutex_;
  bool aborted_ = false;
  std::string reason_;
  std::vector<Work> in_flight_;
};

}  // namespace fold3d::runtime
