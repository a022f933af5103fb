#include "harness/stress.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <utility>

namespace fold3d::test {

namespace {

#if defined(__SANITIZE_THREAD__)
constexpr bool kTsan = true;
#else
constexpr bool kTsan = false;
#endif

}  // namespace

int stress_runs(int normal, int under_tsan) {
  const char* const wanted = std::getenv("FOLD3D_STRESS_RUNS");
  if (wanted != nullptr) return std::atoi(wanted);
  return kTsan ? under_tsan : normal;
}

int fuzz_runs(int normal) {
  const char* const wanted = std::getenv("FOLD3D_FUZZ_RUNS");
  if (wanted != nullptr) return std::atoi(wanted);
  return kTsan ? normal / 50 : normal;
}

Deadline::Deadline(std::chrono::seconds limit, std::string what)
    : thread_([this, limit, what = std::move(what)] {
        std::unique_lock lock(mutex_);
        if (changed_.wait_for(lock, limit, [this] { return met_; })) return;
        ADD_FAILURE() << what << ": hangs, " << limit.count() << " s are over";
        std::_Exit(1);
      }) {}

Deadline::~Deadline() {
  {
    const std::lock_guard lock(mutex_);
    met_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

}  // namespace fold3d::test
