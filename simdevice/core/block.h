#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "simdevice/core/history.h"

namespace simdevice {

class Stream;

/// Memory that is handed out again and again, always whole. Its fields belong to the Runtime, under its lock.
struct Block {
  static constexpr int kPinned = -1;

  void* data = nullptr;
  std::size_t capacity = 0;
  std::size_t size = 0;        // of what is handed out now
  int device = kPinned;        // or kPinned: host memory that devices reach
  Stream* stream = nullptr;    // that it was allocated on; null: pinned
  std::vector<Stream*> users;  // others that were announced (record_stream)
  History history;             // outlives each user: a late kernel of the last one races with the next

  std::uintptr_t begin() const { return reinterpret_cast<std::uintptr_t>(data); }
};

/// Bytes of a block that a kernel touches.
struct Access {
  Block* block = nullptr;
  Footprint bytes;
  bool writes = false;
};

}  // namespace simdevice
