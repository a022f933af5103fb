#pragma once

#include <cstddef>
#include <map>
#include <optional>

namespace fold3d::memory {

/// Which parts of one range of bytes are taken: the smallest free part that fits is cut (best fit), neighbours that are
/// free become one. Stashes of a chunk are of one size, so parts mostly fit again. Not thread-safe.
class Slots {
 public:
  explicit Slots(std::size_t bytes);

  /// The begin of a part of `bytes`, >= 1; nothing if none is large enough.
  std::optional<std::size_t> take(std::size_t bytes);
  /// Gives back what take() returned for as many `bytes`.
  void give_back(std::size_t begin, std::size_t bytes);

  std::size_t free_bytes() const { return free_; }
  std::size_t largest_free() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }

 private:
  void add(std::size_t begin, std::size_t bytes);
  void remove(std::map<std::size_t, std::size_t>::iterator part);

  std::size_t free_ = 0;
  std::map<std::size_t, std::size_t> parts_;         // free: begin -> bytes
  std::multimap<std::size_t, std::size_t> by_size_;  // free: bytes -> begin
};

}  // namespace fold3d::memory
