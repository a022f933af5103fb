#include "runtime/memory/cpu_bytes.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>

#ifdef __APPLE__
#include <malloc/malloc.h>
#else
#include <malloc.h>
#endif

namespace fold3d::runtime {
namespace {

std::atomic<std::int64_t> live{0};
std::atomic<std::int64_t> peak{0};
std::atomic<std::int64_t> host{0};
thread_local bool as_host = false;

/// What malloc gave for this pointer: so nothing has to be kept beside it.
std::int64_t size_of(void* memory) {
#ifdef __APPLE__
  return static_cast<std::int64_t>(malloc_size(memory));
#else
  return static_cast<std::int64_t>(malloc_usable_size(memory));
#endif
}

void add(std::int64_t bytes) {
  const std::int64_t now = live.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  std::int64_t most = peak.load(std::memory_order_relaxed);
  while (now > most && !peak.compare_exchange_weak(most, now, std::memory_order_relaxed)) {
  }
}

/// torch's default allocator, counted. Its memory comes from malloc, and a pointer to it is all that its deleter takes.
class CountingAllocator final : public at::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    c10::DataPtr memory = c10::GetDefaultCPUAllocator()->allocate(bytes);
    void* const pointer = memory.get();
    if (pointer == nullptr || memory.get_context() != pointer) return memory;
    const c10::Device device = memory.device();
    if (as_host) {
      host.fetch_add(size_of(pointer), std::memory_order_relaxed);
      return {pointer, memory.release_context(), &release_host, device};
    }
    add(size_of(pointer));
    return {pointer, memory.release_context(), &release, device};
  }

  at::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  static void release(void* pointer) {
    if (pointer == nullptr) return;
    add(-size_of(pointer));
    c10::GetDefaultCPUAllocator()->raw_deleter()(pointer);
  }

  static void release_host(void* pointer) {
    if (pointer == nullptr) return;
    host.fetch_sub(size_of(pointer), std::memory_order_relaxed);
    c10::GetDefaultCPUAllocator()->raw_deleter()(pointer);
  }
};

CountingAllocator& counting_allocator() {
  static auto* const allocator = new CountingAllocator;  // tensors that outlive the process's end point to it
  return *allocator;
}

}  // namespace

bool count_cpu_bytes(bool on) {
  at::Allocator* const counting = &counting_allocator();
  at::Allocator* const standard = c10::GetDefaultCPUAllocator();
  at::Allocator* const current = c10::GetCPUAllocator();
  if (on && current == standard) c10::SetCPUAllocator(counting);
  if (!on && current == counting) c10::SetCPUAllocator(standard);
  return c10::GetCPUAllocator() == counting;
}

std::int64_t live_cpu_bytes() { return live.load(std::memory_order_relaxed); }

std::int64_t host_cpu_bytes() { return host.load(std::memory_order_relaxed); }

bool allocate_as_host(bool on) {
  const bool before = as_host;
  as_host = on;
  return before;
}

std::int64_t peak_cpu_bytes() { return peak.load(std::memory_order_relaxed); }

void reset_peak_cpu_bytes() { peak.store(live_cpu_bytes(), std::memory_order_relaxed); }

bool is_counted(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().data_ptr().get_deleter() == &CountingAllocator::release;
}

}  // namespace fold3d::runtime
