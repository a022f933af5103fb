#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "simdevice/core/runtime.h"

namespace simdevice {
namespace {

using std::chrono::milliseconds;

/// Runtimes are never destroyed: their streams' threads wait for work until the process ends.
Runtime& new_runtime(int devices = 1) {
  static auto& all = *new std::vector<Runtime*>;
  all.push_back(new Runtime(devices));
  return *all.back();
}

Access whole(Block* block, bool writes) { return {block, dense(block->begin(), block->size), writes}; }

void set_value(Runtime& device, Stream* stream, Block* block, int value) {
  device.launch(stream, "set", {whole(block, true)},
                make_task([data = block->data, value] { std::memcpy(data, &value, 4); }));
}

void add_one(Runtime& device, Stream* stream, Block* block) {
  device.launch(stream, "add", {whole(block, true)}, make_task([data = static_cast<int*>(block->data)] { ++*data; }));
}

/// A kernel that only says that it writes: for those that race, which ThreadSanitizer would see, too.
void touch(Runtime& device, Stream* stream, Block* block) {
  device.launch(stream, "touch", {whole(block, true)}, make_task([] {}));
}

int value_of(const Block* block) { return *static_cast<int*>(block->data); }

TEST(SimulatedDevice, RunsAStreamInOrder) {
  Runtime& device = new_runtime();
  Stream* const stream = device.stream(0, 0);
  Block* const block = device.allocate(stream, 4);
  set_value(device, stream, block, 0);
  for (int i = 0; i < 1000; ++i) add_one(device, stream, block);
  device.synchronize(stream);
  EXPECT_EQ(value_of(block), 1000);
  EXPECT_EQ(device.launches(), 1001u);
}

TEST(SimulatedDevice, ReturnsBeforeAKernelHasRun) {
  Runtime& device = new_runtime();
  Stream* const stream = device.stream(0, 0);
  std::atomic<bool> go{false}, ran{false};
  device.launch(stream, "wait", {}, make_task([&] {
                  while (!go) std::this_thread::yield();
                  ran = true;
                }));
  EXPECT_FALSE(device.query(stream));
  EXPECT_FALSE(ran);
  go = true;
  device.synchronize(stream);
  EXPECT_TRUE(ran && device.query(stream));
}

TEST(SimulatedDevice, WaitsOfStreamsOrderThem) {
  Runtime& device = new_runtime();
  Stream* const first = device.stream(0, 0);
  Stream* const second = device.stream_from_pool(0, 0);
  Block* const block = device.allocate(first, 4);
  set_value(device, first, block, 0);
  for (int i = 0; i < 200; ++i) {
    add_one(device, first, block);
    device.wait(second, device.record(first));
    add_one(device, second, block);
    device.wait(first, device.record(second));
  }
  device.synchronize(0);
  EXPECT_EQ(value_of(block), 400);
}

TEST(SimulatedDevice, RaisesAtTheLaterAccess) {
  Runtime& device = new_runtime();
  Stream* const first = device.stream(0, 0);
  Stream* const second = device.stream_from_pool(0, 0);
  Block* const block = device.allocate(first, 4);
  touch(device, first, block);
  EXPECT_THROW(touch(device, second, block), RaceError);
  EXPECT_EQ(device.take_reports().size(), 1u);
  device.synchronize(0);
  touch(device, second, block);
}

TEST(SimulatedDevice, AMarkOrdersOnlyWhatCameBefore) {
  Runtime& device = new_runtime();
  Stream* const first = device.stream(0, 0);
  Stream* const second = device.stream_from_pool(0, 0);
  Block* const block = device.allocate(first, 4);
  const auto early = device.record(first);
  touch(device, first, block);
  device.wait(second, early);
  EXPECT_THROW(touch(device, second, block), RaceError);
}

TEST(SimulatedDevice, TheHostOrdersWhatItHasWaitedFor) {
  Runtime& device = new_runtime();
  Stream* const first = device.stream(0, 0);
  Stream* const second = device.stream_from_pool(0, 0);
  Block* const block = device.allocate(first, 4);
  touch(device, first, block);
  const auto mark = device.record(first);
  while (!device.query(mark)) std::this_thread::yield();
  touch(device, second, block);
  EXPECT_THROW(device.use_on_host("read", whole(block, false)), RaceError);
  device.synchronize(device.record(second));
  device.use_on_host("read", whole(block, false));
}

TEST(SimulatedDevice, FreedMemoryGoesToItsStreamAtOnce) {
  Runtime& device = new_runtime();
  Stream* const first = device.stream(0, 0);
  Stream* const second = device.stream_from_pool(0, 0);
  Block* const block = device.allocate(first, 4);
  touch(device, first, block);
  device.wait(second, device.record(first));
  touch(device, second, block);
  device.free(block);
  EXPECT_EQ(device.allocate(first, 8), block);
  EXPECT_THROW(touch(device, first, block), RaceError);
}

TEST(SimulatedDevice, RecordedUsesKeepMemoryUntilTheyAreDone) {
  Runtime& device = new_runtime();
  Stream* const first = device.stream(0, 0);
  Stream* const second = device.stream_from_pool(0, 0);
  Block* const block = device.allocate(first, 4);
  std::atomic<bool> go{false};
  device.launch(second, "late", {whole(block, false)}, make_task([&] {
                  while (!go) std::this_thread::yield();
                }));
  device.record_use(block, second);
  device.free(block);
  Block* const other = device.allocate(first, 4);
  EXPECT_NE(other, block);
  go = true;
  EXPECT_TRUE(second->wait_until_idle());
  EXPECT_EQ(device.allocate(first, 4), block);
  set_value(device, first, block, 1);
}

TEST(SimulatedDevice, CountsMemory) {
  Runtime& device = new_runtime(2);
  Block* const block = device.allocate(device.stream(1, 0), 1000);
  EXPECT_EQ(device.memory_stats(1).allocated, 1024u);
  EXPECT_EQ(device.memory_stats(0).allocated, 0u);
  device.free(block);
  EXPECT_EQ(device.memory_stats(1).allocated, 0u);
  EXPECT_EQ(device.memory_stats(1).peak, 1024u);
  EXPECT_EQ(device.memory_stats(1).reserved, 1024u);
  device.release_memory();
  EXPECT_EQ(device.memory_stats(1).reserved, 0u);
}

TEST(SimulatedDevice, KnowsPinnedMemory) {
  Runtime& device = new_runtime();
  Block* const block = device.allocate(nullptr, 100);
  EXPECT_TRUE(device.is_pinned(static_cast<char*>(block->data) + 99));
  EXPECT_FALSE(device.is_pinned(&device));
}

TEST(SimulatedDevice, FindsMemoryByWhereItIs) {
  Runtime& device = new_runtime();
  Block* const block = device.allocate(device.stream(0, 0), 100);
  EXPECT_EQ(device.find(static_cast<char*>(block->data) + 99), block);
  EXPECT_FALSE(device.is_pinned(block->data));
  EXPECT_EQ(device.find(&device), nullptr);
}

TEST(SimulatedDevice, AFailedKernelIsReportedByTheNextWait) {
  Runtime& device = new_runtime();
  Stream* const stream = device.stream(0, 0);
  device.launch(stream, "bad", {}, make_task([] { throw std::runtime_error("index out of range"); }));
  EXPECT_THROW(device.synchronize(stream), KernelError);
  device.synchronize(stream);
}

TEST(SimulatedDevice, TimeOnAStreamAddsUp) {
  Runtime& device = new_runtime();
  Stream* const stream = device.stream(0, 0);
  const auto from = device.record(stream);
  for (int i = 0; i < 20; ++i)
    device.launch(stream, "sleep", {},
                  make_task([&] { stream->occupy_until(stream->free_since() + milliseconds(2)); }));
  const auto to = device.record(stream);
  device.synchronize(stream);
  EXPECT_GE(to->time() - from->time(), milliseconds(40));
}

TEST(SimulatedDevice, ManyThreadsLaunchAtOnce) {
  Runtime& device = new_runtime();
  constexpr int kThreads = 4, kRuns = 300;
  std::vector<std::thread> threads;
  std::vector<Block*> sums(kThreads);
  for (int index = 0; index < kThreads; ++index) {
    threads.emplace_back([&, index] {
      Stream* const own = device.stream_from_pool(0, 0);
      Stream* const side = device.stream_from_pool(0, -1);
      Block* const sum = sums[static_cast<std::size_t>(index)] = device.allocate(own, 4);
      set_value(device, own, sum, 0);
      for (int run = 0; run < kRuns; ++run) {
        Block* const passing = device.allocate(own, 4);
        set_value(device, own, passing, 1);
        device.wait(side, device.record(own));
        const auto add = [to = static_cast<int*>(sum->data), from = static_cast<int*>(passing->data)] { *to += *from; };
        device.launch(side, "sum", {whole(sum, true), whole(passing, false)}, make_task(add));
        device.record_use(passing, side);
        device.free(passing);
        if (run % 100 == 0) device.synchronize(side);
      }
      device.synchronize(device.record(side));
    });
  }
  for (auto& thread : threads) thread.join();
  for (const Block* sum : sums) EXPECT_EQ(value_of(sum), kRuns);
  EXPECT_TRUE(device.take_reports().empty());
}

}  // namespace
}  // namespace simdevice
