#include "simdevice/device/allocators.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstring>
#include <utility>

#include "simdevice/device/current.h"

namespace simdevice {

namespace {

/// What a device has: 16 GiB, until it is told otherwise.
std::atomic<std::size_t> device_bytes{std::size_t{16} << 30};

void free_block(void* block) { runtime().free(static_cast<Block*>(block)); }
void free_nothing(void*) {}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_nothing, device_at(current_device())};
    Stream* const stream = current_stream();
    const std::size_t used = runtime().memory_stats(stream->device()).allocated, all = device_bytes;
    TORCH_CHECK_WITH(OutOfMemoryError, used + bytes <= all, "sim out of memory. Tried to allocate ", bytes,
                     " bytes, of ", all, " there are ", used, " in use");
    Block* const block = runtime().allocate(stream, bytes);
    return {block->data, block, &free_block, device_at(stream->device())};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    runtime().synchronize(current_device());
    std::memcpy(to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { runtime().release_memory(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (Block* const block = block_of(data)) runtime().record_use(block, stream_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const MemoryStats stats = runtime().memory_stats(device);
    c10::CachingDeviceAllocator::DeviceStats out;
    for (auto* sum : {&out.allocated_bytes, &out.active_bytes, &out.requested_bytes}) {
      (*sum)[0].current = static_cast<std::int64_t>(stats.allocated);
      (*sum)[0].peak = static_cast<std::int64_t>(stats.peak);
    }
    out.reserved_bytes[0].current = out.reserved_bytes[0].peak = static_cast<std::int64_t>(stats.reserved);
    return out;
  }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const std::size_t used = runtime().memory_stats(device).reserved;
    const std::size_t all = device_bytes;
    return {used < all ? all - used : 0, all};
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { runtime().reset_peak(device); }
};

class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_nothing, c10::Device(c10::kCPU)};
    Block* const block = runtime().allocate(nullptr, bytes);
    return {block->data, block, &free_block, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void* context, c10::Stream stream) override {
    if (context == nullptr) return false;
    runtime().record_use(static_cast<Block*>(context), stream_of(stream));
    return true;
  }
  void empty_cache() override { runtime().release_memory(); }
  at::HostStats get_stats() override {
    const MemoryStats stats = runtime().memory_stats(Block::kPinned);
    at::HostStats out;
    out.allocated_bytes.current = static_cast<std::int64_t>(stats.allocated);
    out.allocated_bytes.peak = static_cast<std::int64_t>(stats.peak);
    return out;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override { runtime().reset_peak(Block::kPinned); }
};

}  // namespace

void set_device_bytes(std::size_t bytes) { device_bytes = bytes; }

c10::DataPtr allocate_on_device(std::size_t bytes) { return c10::GetAllocator(c10::kPrivateUse1)->allocate(bytes); }

Block* block_of(const c10::DataPtr& data) {
  return data.get_deleter() == &free_block ? static_cast<Block*>(data.get_context()) : nullptr;
}

void register_allocators() {
  static DeviceMemory& device = *new DeviceMemory;
  static PinnedMemory& pinned = *new PinnedMemory;
  c10::SetAllocator(c10::kPrivateUse1, &device);
  at::setHostAllocator(at::kPrivateUse1, &pinned);
}

}  // namespace simdevice
