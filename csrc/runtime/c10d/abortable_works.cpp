#include "runtime/c10d/abortable_works.h"

#include <chrono>
#include <exception>
#include <stdexcept>

#include "comm/base/errors.h"

namespace fold3d::runtime {

namespace {

// Whoever waits for a step sets the deadline and calls abort(); c10d's own must not come first.
constexpr std::chrono::milliseconds kNever = std::chrono::hours(24);

}  // namespace

void AbortableWorks::wait(const Work& work) {
  {
    const std::lock_guard lock(mutex_);
    if (!aborted_) in_flight_.push_back(work);
    // A point-to-point work must be waited for or aborted before it is dropped, or later receives hang.
    if (aborted_) work->abort();
  }
  std::exception_ptr error;
  bool completed = false;
  try {
    completed = work->wait(kNever);
  } catch (...) {
    error = std::current_exception();
  }
  {
    const std::lock_guard lock(mutex_);
    std::erase(in_flight_, work);
    if (aborted_) throw comm::AbortedError(reason_);
  }
  if (error) std::rethrow_exception(error);
  if (!completed) throw std::runtime_error("the transfer was aborted");
}

void AbortableWorks::check() const {
  const std::lock_guard lock(mutex_);
  if (aborted_) throw comm::AbortedError(reason_);
}

void AbortableWorks::abort(const std::string& reason) noexcept {
  std::vector<Work> in_flight;
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) return;
    aborted_ = true;
    reason_ = reason;
    in_flight = in_flight_;
  }
  for (const Work& work : in_flight) work->abort();
}

}  // namespace fold3d::runtime
