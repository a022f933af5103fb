// A collective that waits for what its own rank computes: that is no wait for others.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "comm/base/errors.h"
#include "comm/bucket/bucket_sync.h"
#include "harness/ring_harness.h"

namespace fold3d::test {
namespace {

using namespace std::chrono_literals;
using comm::BucketSync;
using comm::NicArbiter;

constexpr auto kLimit = 300ms;

/// What a test says of a device: whether it computes, and when its collective is done.
struct Device {
  std::atomic<bool> computes{false};
  comm::CollectiveStream::Listener* listener = nullptr;

  void complete() { listener->completed({.traffic = NicArbiter::Traffic::kReduce, .bucket = 0}); }
};

class DeviceStream final : public comm::CollectiveStream {
 public:
  explicit DeviceStream(Device& device) : device_(device) {}
  void start(Listener& listener) override { device_.listener = &listener; }
  void push(comm::Collective) override {}
  void abort(const std::string&) noexcept override {}
  void stop() noexcept override {}
  std::string waits_for() const override { return device_.computes ? "this rank computes" : "replica 1 is late"; }
  bool waits_for_own_rank() const override { return device_.computes; }

 private:
  Device& device_;
};

/// A rank whose only bucket is handed over while its device computes.
class OwnRank : public ::testing::Test {
 protected:
  OwnRank()
      : sync_({.timeout = kLimit, .name = "r", .size = 2}, std::make_shared<NicArbiter>(),
              std::make_unique<DeviceStream>(reduces_), std::make_unique<DeviceStream>(gathers_)) {
    reduces_.computes = true;
    sync_.begin(1, {});
    sync_.reduce(bucket_.collective());
  }

  Device reduces_, gathers_;
  const TestBucket<float> bucket_{0, contents<float>(0, 0, 1, 8)};
  BucketSync sync_;
};

TEST_F(OwnRank, MayComputeForLongerThanTheLimit) {
  std::thread device([&] {
    std::this_thread::sleep_for(3 * kLimit);
    reduces_.computes = false;
    std::this_thread::sleep_for(kLimit / 3);
    reduces_.complete();
  });
  EXPECT_NO_THROW(sync_.wait_reduced(0));
  EXPECT_NO_THROW(sync_.drain());
  device.join();
}

TEST_F(OwnRank, WaitsForOthersFromThenOn) {
  std::thread device([&] {
    std::this_thread::sleep_for(2 * kLimit);
    reduces_.computes = false;
  });
  const auto start = std::chrono::steady_clock::now();
  try {
    sync_.wait_reduced(0);
    ADD_FAILURE() << "nobody came";
  } catch (const comm::TimeoutError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("not done after 0.300 s (setting comm_timeout): replica 1 is late"), text.npos) << text;
  }
  EXPECT_GE(std::chrono::steady_clock::now() - start, 2 * kLimit + kLimit / 2);
  device.join();
}

}  // namespace
}  // namespace fold3d::test
