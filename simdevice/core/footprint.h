#pragma once

#include <cstdint>
#include <vector>

namespace simdevice {

/// The bytes that a kernel touches: rows of `width` bytes, `pitch` apart, in [begin, end). Dense: one row.
struct Footprint {
  std::uintptr_t begin = 0, end = 0;
  std::uintptr_t pitch = 0, width = 0;

  bool is_dense() const { return end - begin == width; }
};

inline Footprint dense(std::uintptr_t begin, std::uintptr_t bytes) { return {begin, begin + bytes, bytes, bytes}; }

/// The footprint of a strided tensor at `begin`, none of whose sizes is 0: exact where its dimensions are a dense run
/// of bytes and evenly spaced repetitions of it (so also columns of a matrix), else all from its first to its last
/// byte. strides: not negative, in elements.
Footprint footprint_of(std::uintptr_t begin, const std::vector<std::int64_t>& sizes,
                       const std::vector<std::int64_t>& strides, std::int64_t element_bytes);

/// Whether some byte is in both. Exact for dense ones and for equal pitches, else it may err towards yes.
bool overlap(const Footprint& a, const Footprint& b);

/// Whether every byte of `b` is in `a`; may err towards no.
bool covers(const Footprint& a, const Footprint& b);

}  // namespace simdevice
