#include "memory/host_pool.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "memory/host_memory.h"
#include "memory/slot/slots.h"
#include "memory/slot/tier.h"

namespace fold3d::memory {
namespace {

std::size_t aligned(std::size_t bytes) {
  return std::max<std::size_t>(1, (bytes + Tier::kAlignment - 1) / Tier::kAlignment) * Tier::kAlignment;
}

}  // namespace

struct HostPool::State {
  struct Extent {
    std::shared_ptr<Tier> tier;
    Slots slots;
  };

  mutable std::mutex mutex;
  std::vector<std::unique_ptr<Extent>> extents;  // they never move
  PoolCounters counters;

  void add(std::shared_ptr<Tier> tier) {
    const std::lock_guard lock(mutex);
    counters.bytes += static_cast<std::int64_t>(tier->bytes());
    const std::size_t bytes = tier->bytes();
    extents.push_back(std::make_unique<Extent>(Extent{std::move(tier), Slots(bytes)}));
  }

  /// Of one extent.
  struct Part {
    Extent* extent;
    std::size_t begin, bytes;
  };

  void give_back(const std::vector<Part>& parts) {
    const std::lock_guard lock(mutex);
    for (const Part& part : parts) {
      part.extent->slots.give_back(part.begin, part.bytes);
      counters.in_use -= static_cast<std::int64_t>(part.bytes);
    }
  }

  std::size_t free_bytes() const {
    const std::lock_guard lock(mutex);
    return free_locked();
  }

  std::size_t free_locked() const {
    std::size_t sum = 0;
    for (const auto& extent : extents) sum += extent->slots.free_bytes();
    return sum;
  }

  /// Parts of `bytes` in all, which are free: the smallest that has room for them, else the largest ones.
  std::vector<Part> take_locked(std::size_t bytes) {
    Extent* best = nullptr;
    for (const auto& extent : extents) {
      const std::size_t largest = extent->slots.largest_free();
      if (largest >= bytes && (best == nullptr || largest < best->slots.largest_free())) best = extent.get();
    }
    if (best != nullptr) return {{best, *best->slots.take(bytes), bytes}};
    std::vector<Part> parts;
    while (bytes > 0) {
      const auto most = std::max_element(extents.begin(), extents.end(), [](const auto& a, const auto& b) {
        return a->slots.largest_free() < b->slots.largest_free();
      });
      const std::size_t some = std::min(bytes, (*most)->slots.largest_free());
      parts.push_back({most->get(), *(*most)->slots.take(some), some});
      bytes -= some;
    }
    return parts;
  }
};

HostPool::HostPool(MakeTier make, std::size_t bytes)
    : make_(std::move(make)), grows_(bytes == 0), state_(std::make_shared<State>()) {
  if (!grows_) state_->add(make_(aligned(bytes)));
}

HostPool::~HostPool() = default;

void HostPool::reserve(std::size_t bytes) {
  if (!grows_) return;
  const std::size_t free = state_->free_bytes();
  if (free < aligned(bytes)) state_->add(make_(aligned(bytes) - free));  // a slot may lie in several pieces
}

void HostPool::begin() {
  const std::lock_guard lock(state_->mutex);
  state_->counters.peak = state_->counters.in_use;
}

Slot HostPool::try_take(std::size_t bytes) {
  const std::size_t size = aligned(bytes);
  const std::lock_guard lock(state_->mutex);
  if (state_->free_locked() < size) return {};
  std::vector<State::Part> parts = state_->take_locked(size);
  state_->counters.in_use += static_cast<std::int64_t>(size);
  state_->counters.peak = std::max(state_->counters.peak, state_->counters.in_use);
  std::vector<Slot::Span> spans;
  for (const State::Part& part : parts) spans.push_back({part.extent->tier, part.begin, part.bytes});
  std::shared_ptr<void> lease(nullptr, [state = state_, parts = std::move(parts)](void*) { state->give_back(parts); });
  return {std::move(spans), std::move(lease)};
}

Slot HostPool::take(std::size_t bytes, const std::string& user) {
  const std::size_t size = aligned(bytes);
  Slot slot = try_take(bytes);
  while (!slot && grows_) {  // somebody else may take what was added
    state_->add(make_(size));
    slot = try_take(bytes);
  }
  if (slot) return slot;
  const PoolCounters now = counters();
  throw PoolError("the pool for offloaded activations is full: " + user + " needs " +
                  size_text(static_cast<std::int64_t>(size)) + ", " + size_text(now.bytes - now.in_use) + " of " +
                  size_text(now.bytes) + " are free; raise offload_pool, or leave it at \"auto\"");
}

PoolCounters HostPool::counters() const {
  const std::lock_guard lock(state_->mutex);
  return state_->counters;
}

}  // namespace fold3d::memory
