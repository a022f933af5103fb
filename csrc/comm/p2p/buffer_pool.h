#pragma once

#include <cstddef>
#include <memory>

#include "comm/base/allocator.h"
#include "comm/base/tensor.h"

namespace fold3d::comm {

/// Receive buffers of one rank, kept by size. A buffer comes back when its last shared_ptr goes, on whatever
/// thread and even after the pool itself is gone. Holds no more free buffers of a size than the last step
/// used at once. Thread-safe.
class BufferPool {
 public:
  /// `allocator` must outlive the pool.
  explicit BufferPool(Allocator& allocator);
  ~BufferPool();

  /// A buffer of desc.bytes() bytes with arbitrary content. Throws what Allocator::allocate throws.
  std::shared_ptr<Buffer> acquire(const TensorDesc& desc);

  /// A new step begins: frees what the step before had no use for.
  void next_step();

  /// Buffers that lie ready, of all sizes.
  std::size_t num_free() const;

 private:
  struct State;
  Allocator& allocator_;
  std::shared_ptr<State> state_;
};

}  // namespace fold3d::comm
