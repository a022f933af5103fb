#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace fold3d::test {

/// How many random runs a stress test makes: FOLD3D_STRESS_RUNS if it is set.
int stress_runs(int normal, int under_tsan);

/// How many inputs a test of a parser makes: FOLD3D_FUZZ_RUNS if it is set; few under TSan, as parsers know no threads.
int fuzz_runs(int normal);

/// Ends the process with a failure that tells `what` if it is still there after `limit`. For runs that may hang where
/// no timeout reaches: a thread cannot be ended from outside, so the test could not even say which run it was.
class Deadline {
 public:
  Deadline(std::chrono::seconds limit, std::string what);
  ~Deadline();
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool met_ = false;
  std::thread thread_;
};

}  // namespace fold3d::test
