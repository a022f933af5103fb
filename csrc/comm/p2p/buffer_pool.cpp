#include "comm/p2p/buffer_pool.h"

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace fold3d::comm {

struct BufferPool::State {
  struct Shelf {
    std::size_t bytes = 0;
    std::size_t in_use = 0;
    std::size_t peak = 0;  // of in_use, in this step
    std::vector<std::shared_ptr<Buffer>> free;
  };

  std::mutex mutex;
  std::vector<Shelf> shelves;  // a step has few sizes: a search is shorter than a hash

  Shelf& shelf(std::size_t bytes) {
    const auto found = std::find_if(shelves.begin(), shelves.end(), [&](const Shelf& s) { return s.bytes == bytes; });
    if (found != shelves.end()) return *found;
    return shelves.emplace_back(Shelf{.bytes = bytes, .in_use = 0, .peak = 0, .free = {}});
  }

  void put_back(std::shared_ptr<Buffer> buffer) {
    const std::lock_guard lock(mutex);
    Shelf& home = shelf(buffer->bytes());
    --home.in_use;
    home.free.push_back(std::move(buffer));
  }
};

BufferPool::BufferPool(Allocator& allocator) : allocator_(allocator), state_(std::make_shared<State>()) {}

BufferPool::~BufferPool() = default;

std::shared_ptr<Buffer> BufferPool::acquire(const TensorDesc& desc) {
  const std::size_t bytes = desc.bytes();
  std::shared_ptr<Buffer> buffer;
  {
    const std::lock_guard lock(state_->mutex);
    State::Shelf& shelf = state_->shelf(bytes);
    shelf.peak = std::max(shelf.peak, ++shelf.in_use);
    if (!shelf.free.empty()) {
      buffer = std::move(shelf.free.back());
      shelf.free.pop_back();
    }
  }
  if (!buffer) {
    try {
      buffer = allocator_.allocate(desc);
      if (!buffer || buffer->bytes() != bytes) {
        throw std::logic_error("Allocator::allocate returned " +
                               (buffer ? std::to_string(buffer->bytes()) : std::string("no")) + " bytes where " +
                               std::to_string(bytes) + " were asked for");
      }
    } catch (...) {
      const std::lock_guard lock(state_->mutex);
      --state_->shelf(bytes).in_use;
      throw;
    }
  }
  Buffer* const raw = buffer.get();
  return {raw, [owner = std::move(buffer), home = std::weak_ptr(state_)](Buffer*) mutable {
            const auto state = home.lock();
            if (!state) return;
            owner->returns();
            state->put_back(std::move(owner));
          }};
}

void BufferPool::next_step() {
  std::vector<std::shared_ptr<Buffer>> unused;  // freed after the lock is gone
  const std::lock_guard lock(state_->mutex);
  for (State::Shelf& shelf : state_->shelves) {
    while (!shelf.free.empty() && shelf.free.size() + shelf.in_use > shelf.peak) {
      unused.push_back(std::move(shelf.free.back()));
      shelf.free.pop_back();
    }
    shelf.peak = shelf.in_use;
  }
  std::erase_if(state_->shelves, [](const State::Shelf& s) { return s.in_use == 0 && s.free.empty(); });
}

std::size_t BufferPool::num_free() const {
  const std::lock_guard lock(state_->mutex);
  std::size_t count = 0;
  for (const State::Shelf& shelf : state_->shelves) count += shelf.free.size();
  return count;
}

}  // namespace fold3d::comm
