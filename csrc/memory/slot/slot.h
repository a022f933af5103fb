// Slot: a part of the pool.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "memory/slot/tier.h"

namespace fold3d::memory {

/// Tensors in a slot begin at multiples of it, so that elements of any type stay aligned.
inline constexpr std::size_t kSlotAlignment = 64;

/// The least multiple of it that has room for `bytes`.
inline std::size_t slot_aligned(std::size_t bytes) {
  return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

/// A part of the pool, in one piece or, where none of what is free is large enough, in several: what is free suffices,
/// however it lies. Goes back when it is destroyed, on any thread and even after the pool is gone.
class Slot {
 public:
  /// Bytes of a tier that lie together.
  struct Span {
    std::shared_ptr<Tier> tier;
    std::size_t begin = 0;
    std::size_t bytes = 0;

    /// First byte, if it can be addressed; else nullptr.
    std::byte* data() const { return tier->data() == nullptr ? nullptr : tier->data() + begin; }
  };

  Slot() = default;
  /// `spans`: in their order in the slot.
  Slot(std::vector<Span> spans, std::shared_ptr<void> lease) : spans_(std::move(spans)), lease_(std::move(lease)) {}

  explicit operator bool() const { return !spans_.empty(); }
  std::size_t bytes() const;
  /// First byte, if it is in one piece and can be addressed; else nullptr.
  std::byte* data() const { return spans_.size() == 1 ? spans_.front().data() : nullptr; }
  /// Whether every span can be addressed.
  bool is_addressable() const;

  /// Where bytes [offset, offset + bytes) lie.
  std::vector<Span> spans(std::size_t offset, std::size_t bytes) const;

  /// Copies `pieces` to it, or from it, as Tier does.
  void write(const Pieces& pieces) const;
  void read(const Pieces& pieces) const;

 private:
  std::vector<Span> spans_;
  std::shared_ptr<void> lease_;
};

}  // namespace fold3d::memory
