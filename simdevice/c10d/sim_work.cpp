#include "simdevice/c10d/sim_work.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>

#include <utility>

#include "simdevice/device/current.h"
#include "simdevice/device/left_out.h"

namespace simdevice {

SimWork::SimWork(int rank, c10d::OpType type, Stream* stream, std::shared_ptr<Mark> end, Tensors kept,
                 const Tensors& results, bool is_barrier)
    : c10d::Work(rank, type),
      stream_(stream),
      end_(std::move(end)),
      kept_(std::move(kept)),
      results_(results),
      is_barrier_(is_barrier) {
  const c10::StreamGuard guard(as_c10(stream));  // the future records its event there
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     std::vector<c10::Device>{device_at(stream->device())});
  future_->markCompleted(c10::IValue(results));
}

bool SimWork::isCompleted() { return runtime().query(end_); }
bool SimWork::isSuccess() const { return end_->is_passed(); }

void SimWork::synchronize() {
  if (is_left_out(Ordering::kWorkWait)) return;
  runtime().wait(current_stream(stream_->device()), end_);
  kept_.clear();
  if (is_barrier_) runtime().synchronize(end_);
}

bool SimWork::wait(std::chrono::milliseconds) {
  synchronize();
  return true;
}

}  // namespace simdevice
