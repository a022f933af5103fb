#include "ops/handle.h"

#include <ATen/ops/from_blob.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace fold3d::ops {
namespace {

/// What the first tensor of a handle owns; copies of it find the exchange by the number for as long as it lives.
struct Handle {
  std::int64_t number = 0;  // what the tensor shows
  std::shared_ptr<Started> started;
};

class Handles {
 public:
  Handle* add(std::shared_ptr<Started> started) {
    const std::lock_guard lock(mutex_);
    const std::int64_t number = next_++;
    handles_.emplace(number, started);
    return new Handle{.number = number, .started = std::move(started)};
  }

  void remove(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    handles_.erase(number);
  }

  std::shared_ptr<Started> find(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = handles_.find(number);
    return found == handles_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::int64_t next_ = 0;
  std::map<std::int64_t, std::weak_ptr<Started>> handles_;
};

Handles& handles() {
  static Handles only;
  return only;
}

void release(void* context) {
  const std::unique_ptr<Handle> handle(static_cast<Handle*>(context));
  handles().remove(handle->number);
}

}  // namespace

at::Tensor handle_of(std::shared_ptr<Started> started) {
  Handle* const handle = handles().add(std::move(started));
  return at::from_blob(
      &handle->number, {1}, [handle](void*) { release(handle); }, at::TensorOptions().dtype(at::kLong));
}

std::shared_ptr<Started> started_of(const at::Tensor& handle) {
  if (handle.is_cpu() && handle.scalar_type() == at::kLong && handle.numel() == 1) {
    if (std::shared_ptr<Started> started = handles().find(*handle.const_data_ptr<std::int64_t>())) return started;
  }
  throw std::invalid_argument(
      "this tensor is no handle of an exchange: keep what tp_..._start returned until it was waited for");
}

}  // namespace fold3d::ops
