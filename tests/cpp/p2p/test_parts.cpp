// The parts of the communicator one by one: queue, buffer pool.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "comm/base/host_buffer.h"
#include "comm/p2p/buffer_pool.h"
#include "comm/p2p/transfer_queue.h"

namespace fold3d::test {
namespace {

using namespace std::chrono_literals;
using comm::TransferQueue;

TransferQueue::Clock::time_point in(std::chrono::milliseconds time) { return TransferQueue::Clock::now() + time; }

TEST(TransferQueue, RunsWhatIsAllowedInOrderAndNoMore) {
  std::vector<std::size_t> ran;  // read after wait(), which orders it
  TransferQueue queue("test", [&](std::size_t k) { ran.push_back(k); });
  queue.start(5);
  queue.raise(3);
  ASSERT_EQ(queue.wait(3, in(10s)), TransferQueue::Outcome::kDone);
  EXPECT_EQ(ran, (std::vector<std::size_t>{0, 1, 2}));
  EXPECT_FALSE(queue.idle());
  EXPECT_EQ(queue.wait(4, in(5ms)), TransferQueue::Outcome::kTimeout);
  queue.raise(2);    // never lowers
  queue.raise(100);  // never beyond the step
  ASSERT_EQ(queue.wait(5, in(10s)), TransferQueue::Outcome::kDone);
  EXPECT_TRUE(queue.idle());
  queue.start(1);  // the next step counts from 0
  queue.raise(1);
  ASSERT_EQ(queue.wait(1, in(10s)), TransferQueue::Outcome::kDone);
  EXPECT_EQ(ran, (std::vector<std::size_t>{0, 1, 2, 3, 4, 0}));
}

TEST(TransferQueue, StopEndsAWaitAndDoneWins) {
  TransferQueue queue("test", [](std::size_t) {});
  queue.start(2);
  queue.raise(1);
  ASSERT_EQ(queue.wait(1, in(10s)), TransferQueue::Outcome::kDone);
  auto waiting = std::async(std::launch::async, [&] { return queue.wait(2, in(60s)); });
  queue.stop();
  EXPECT_EQ(waiting.get(), TransferQueue::Outcome::kStopped);
  EXPECT_EQ(queue.wait(1, in(0ms)), TransferQueue::Outcome::kDone);
  queue.raise(2);  // runs nothing any more
  EXPECT_EQ(queue.wait(2, in(0ms)), TransferQueue::Outcome::kStopped);
}

comm::TensorDesc bytes_desc(std::int64_t bytes) {
  return {.dtype = 0, .element_bytes = 1, .requires_grad = false, .shape = {bytes}};
}

TEST(BufferPool, ReusesBySizeAndKeepsNoMoreThanAStepNeeded) {
  comm::HostAllocator allocator;
  comm::BufferPool pool(allocator);
  auto a = pool.acquire(bytes_desc(100));
  auto b = pool.acquire(bytes_desc(100));
  auto c = pool.acquire(bytes_desc(7));
  const comm::Buffer* const first = a.get();
  EXPECT_EQ(a->bytes(), 100u);
  a.reset();
  EXPECT_EQ(pool.num_free(), 1u);
  EXPECT_EQ(pool.acquire(bytes_desc(100)).get(), first);  // and comes back at once
  b.reset();
  c.reset();
  EXPECT_EQ(pool.num_free(), 3u);
  pool.next_step();  // the step before used two of 100 and one of 7
  EXPECT_EQ(pool.num_free(), 3u);
  pool.acquire(bytes_desc(100)).reset();
  pool.next_step();  // ... now one of 100
  EXPECT_EQ(pool.num_free(), 1u);
  pool.next_step();
  EXPECT_EQ(pool.num_free(), 0u);
}

TEST(BufferPool, ABufferOutlivesThePool) {
  comm::HostAllocator allocator;
  auto pool = std::make_unique<comm::BufferPool>(allocator);
  auto held = pool->acquire(bytes_desc(64));
  pool.reset();
  held->host_data()[63] = std::byte{1};
  held.reset();
}

}  // namespace
}  // namespace fold3d::test
