#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>

#include "simdevice/c10d/gloo_calls.h"
#include "simdevice/core/runtime.h"

namespace simdevice {

/// A collective or message under way. As with NCCL, wait() makes the current stream wait and not the host, and the
/// tensors are kept alive until then. barrier(): the host waits, too.
class SimWork final : public c10d::Work {
 public:
  /// end: where the communicator's stream is done with it.
  SimWork(int rank, c10d::OpType type, Stream* stream, std::shared_ptr<Mark> end, Tensors kept, const Tensors& results,
          bool is_barrier);

  bool isCompleted() override;
  bool isSuccess() const override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Stream* const stream_;
  const std::shared_ptr<Mark> end_;
  Tensors kept_;
  const Tensors results_;
  const bool is_barrier_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace simdevice
