#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "simdevice/core/block.h"
#include "simdevice/core/mark.h"

namespace simdevice {

/// Bytes of one device, or of pinned memory.
struct MemoryStats {
  std::size_t allocated = 0, peak = 0, reserved = 0;
};

/// Blocks, and those that are free to be handed out again: to the stream that they were allocated on, at once and last
/// in first out, as CUDA's caching allocator does. Sizes are rounded up, blocks are never split. Not thread-safe.
class Memory {
 public:
  ~Memory() = delete;  // lives as long as the process, because kernels on detached threads use it

  /// A block for `size` > 0 bytes. stream: null for pinned memory. Throws std::bad_alloc.
  Block* allocate(int device, Stream* stream, std::size_t size);

  /// Takes the block back. marks: one of each user's stream, which must be passed before it is handed out again.
  void free(Block* block, std::vector<std::shared_ptr<Mark>> marks);

  /// The block that `address` lies in, handed out or not; null: none.
  Block* find(std::uintptr_t address) const;

  /// Gives to the system what is free; only when no kernel runs.
  void release();

  MemoryStats stats(int device) const;
  void reset_peak(int device);

 private:
  using Key = std::tuple<int, Stream*, std::size_t>;
  struct Waiting {
    Block* block;
    std::vector<std::shared_ptr<Mark>> marks;
  };

  void collect();

  std::set<Block*> handed_out_;
  std::map<Key, std::vector<Block*>> free_;
  std::vector<Waiting> waiting_;
  std::map<std::uintptr_t, Block*> by_address_;
  std::map<int, MemoryStats> stats_;
};

}  // namespace simdevice
