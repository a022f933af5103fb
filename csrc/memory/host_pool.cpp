#include "memory/host_pool.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "memory/host_memory.h"
#include "memory/slots.h"
#include "memory/tier.h"

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

  void give_back(Extent* extent, std::size_t begin, std::size_t bytes) {
    const std::lock_guard lock(mutex);
    extent->slots.give_back(begin, bytes);
    counters.in_use -= static_cast<std::int64_t>(bytes);
  }

  std::size_t free_bytes() const {
    const std::lock_guard lock(mutex);
    std::size_t sum = 0;
    for (const auto& extent : extents) sum += extent->slots.free_bytes();
    return sum;
  }
};

HostPool::HostPool(MakeTier make, std::size_t bytes)
    : make_(std::move(make)), grows_(bytes == 0), state_(std::make_shared<State>()) {
  if (!grows_) state_->add(make_(aligned(bytes)));
}

HostPool::~HostPool() = default;

void HostPool::reserve(std::size_t bytes) {
  if (grows_ && state_->free_bytes() < aligned(bytes)) state_->add(make_(aligned(bytes)));
}

void HostPool::begin() {
  const std::lock_guard lock(state_->mutex);
  state_->counters.peak = state_->counters.in_use;
}

Slot HostPool::try_take(std::size_t bytes) {
  const std::size_t size = aligned(bytes);
  const std::lock_guard lock(state_->mutex);
  State::Extent* best = nullptr;
  for (const auto& extent : state_->extents) {
    const std::size_t largest = extent->slots.largest_free();
    if (largest >= size && (best == nullptr || largest < best->slots.largest_free())) best = extent.get();
  }
  if (best == nullptr) return {};
  const std::size_t begin = *best->slots.take(size);
  state_->counters.in_use += static_cast<std::int64_t>(size);
  state_->counters.peak = std::max(state_->counters.peak, state_->counters.in_use);
  std::shared_ptr<void> lease(nullptr,
                              [state = state_, best, begin, size](void*) { state->give_back(best, begin, size); });
  return {best->tier, begin, size, std::move(lease)};
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
