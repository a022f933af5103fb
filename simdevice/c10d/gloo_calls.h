#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace simdevice {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

/// What the streams of a group do over gloo: start, wait, be aborted. Thread-safe.
class GlooCalls {
 public:
  explicit GlooCalls(BackendPtr gloo) : gloo_(std::move(gloo)) {}

  /// Starts a collective; one after the other, because gloo numbers them.
  WorkPtr start(const std::function<WorkPtr(c10d::Backend&)>& call);
  /// Waits for it. Throws what gloo throws (its timeout above all), and when abort() is called.
  void wait_for_collective(const WorkPtr& work);
  void wait_for_message(const WorkPtr& work);

  /// Ends all waits, those to come, too.
  void abort();
  bool is_aborted() const { return aborted_; }

 private:
  void check() const;

  const BackendPtr gloo_;
  std::mutex start_;
  /// Shared with callbacks, which gloo's threads destroy: they must not be the last to hold gloo.
  struct Signal {
    std::mutex mutex;
    std::condition_variable changed;
  };
  const std::shared_ptr<Signal> signal_ = std::make_shared<Signal>();
  std::set<c10d::Work*> messages_;  // that somebody waits for
  std::atomic<bool> aborted_{false};
};

}  // namespace simdevice
