#pragma once

#include <cstddef>
#include <stdexcept>
#include <vector>

namespace fold3d::memory {

/// The pool cannot be had or used: the text names the bytes, what there is and the setting to change.
class PoolError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Bytes on the device's side of a copy, and where they lie in a tier, from the beginning of a slot.
struct Piece {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::size_t offset = 0;
};

/// Ascending and disjoint in the slot.
using Pieces = std::vector<Piece>;

/// One allocation outside of the device. write() is called by one thread at a time, read() by one thread at a time.
class Tier {
 public:
  /// Offsets and sizes of slots are multiples of it: what O_DIRECT asks for, and a page.
  static constexpr std::size_t kAlignment = 4096;

  virtual ~Tier() = default;
  virtual std::size_t bytes() const = 0;

  /// First byte, if the tier can be addressed; else nullptr.
  virtual std::byte* data() = 0;

  /// Copies `pieces` to, or from, the slot that begins at `begin`. Throws PoolError when the tier fails.
  virtual void write(std::size_t begin, const Pieces& pieces) = 0;
  virtual void read(std::size_t begin, const Pieces& pieces) = 0;
};

}  // namespace fold3d::memory
