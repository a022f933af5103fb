// TensorGroup over a torch.distributed process group.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "comm/tensor/tensor_account.h"
#include "ops/tensor_group.h"

namespace fold3d::ops {

/// Ends waits for collectives of a group that cannot be aborted themselves, as gloo's. Thread-safe.
class WaitLimits {
 public:
  struct Options {
    std::chrono::milliseconds timeout{0};      ///< longest wait (setting comm_timeout); 0: the group's own limit
    std::string name = "this rank";            ///< how errors call it
    std::function<void()> while_waiting = {};  ///< called by who waits, every kLook; what it throws ends the wait
  };
  WaitLimits() = default;
  explicit WaitLimits(Options options) : options_(std::move(options)) {}

  /// Ends all waits, now and later, with AbortedError(reason). Idempotent, the first reason stays.
  void abort(const std::string& reason) noexcept;
  /// Blocks until a work on host memory is complete. Throws AbortedError, TimeoutError, or what went wrong with it.
  void wait(c10d::Work& work, const std::string& what);

 private:
  void check();

  const Options options_;
  std::mutex mutex_;
  std::atomic<bool> aborted_{false};
  std::string reason_;
};

/// The library of the group carries everything: NCCL device memory, gloo host memory.
class C10dGroup final : public TensorGroup {
 public:
  /// Resolves the group by name. Throws c10::Error when it does not exist.
  /// `account` hears of collectives on host memory: under way from their call on, bytes as if they went round a ring,
  /// for what the library sends it does not tell. None: there are none, or nobody asks.
  explicit C10dGroup(const std::string& name, std::shared_ptr<WaitLimits> limits = std::make_shared<WaitLimits>(),
                     std::shared_ptr<comm::TensorAccount> account = nullptr);

  std::int64_t rank() const override { return group_->getRank(); }
  std::int64_t size() const override { return group_->getSize(); }
  std::shared_ptr<Started> all_reduce(const at::Tensor& x, comm::Reduction reduction, bool in_place) override;
  std::shared_ptr<Started> reduce_scatter(const at::Tensor& x, std::int64_t dim) override;
  std::shared_ptr<Started> all_gather(const at::Tensor& x, std::int64_t dim, std::int64_t length) override;

 private:
  std::shared_ptr<Started> start(comm::Exchange::Kind kind, std::size_t bytes, std::size_t rounds,
                                 const std::function<c10::intrusive_ptr<c10d::Work>()>& issue, const at::Tensor& result,
                                 std::function<at::Tensor()> finish = {});

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::shared_ptr<WaitLimits> limits_;
  const std::shared_ptr<comm::TensorAccount> account_;
};

}  // namespace fold3d::ops
