#include "simdevice/c10d/gloo_calls.h"

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include <memory>

namespace simdevice {

void GlooCalls::check() const { TORCH_CHECK(!aborted_, "the process group was aborted"); }

WorkPtr GlooCalls::start(const std::function<WorkPtr(c10d::Backend&)>& call) {
  check();
  const std::lock_guard lock(start_);
  return call(*gloo_);
}

void GlooCalls::wait_for_collective(const WorkPtr& work) {
  auto done = std::make_shared<bool>(false);  // set under the mutex; outlives an aborted wait
  work->getFuture()->addCallback([signal = signal_, done](c10::ivalue::Future&) {
    {
      const std::lock_guard lock(signal->mutex);
      *done = true;
    }
    signal->changed.notify_all();
  });
  {
    std::unique_lock lock(signal_->mutex);
    signal_->changed.wait(lock, [&] { return *done || aborted_; });
  }
  check();
  work->wait();
}

void GlooCalls::wait_for_message(const WorkPtr& work) {
  {
    const std::lock_guard lock(signal_->mutex);
    check();
    messages_.insert(work.get());
  }
  std::exception_ptr error;
  bool good = false;
  try {
    good = work->wait();
  } catch (...) {
    error = std::current_exception();
  }
  {
    const std::lock_guard lock(signal_->mutex);
    messages_.erase(work.get());
  }
  check();
  if (error) std::rethrow_exception(error);
  TORCH_CHECK(good, "gloo gave the message up");
}

void GlooCalls::abort() {
  {
    const std::lock_guard lock(signal_->mutex);
    aborted_ = true;
    for (c10d::Work* work : messages_) work->abort();
  }
  signal_->changed.notify_all();
}

}  // namespace simdevice
