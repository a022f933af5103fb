#include "memory/slot/slot.h"

#include <algorithm>

namespace fold3d::memory {
namespace {

/// Those of `pieces` in bytes [from, from + bytes) of a slot, cut to them and counted from there.
Pieces within(const Pieces& pieces, std::size_t from, std::size_t bytes) {
  Pieces inside;
  for (const Piece& piece : pieces) {
    const std::size_t begin = std::max(from, piece.offset);
    const std::size_t end = std::min(from + bytes, piece.offset + piece.bytes);
    if (begin < end) inside.push_back({piece.data + (begin - piece.offset), end - begin, begin - from});
  }
  return inside;
}

}  // namespace

std::size_t Slot::bytes() const {
  std::size_t sum = 0;
  for (const Span& span : spans_) sum += span.bytes;
  return sum;
}

bool Slot::is_addressable() const {
  return std::all_of(spans_.begin(), spans_.end(), [](const Span& span) { return span.data() != nullptr; });
}

std::vector<Slot::Span> Slot::spans(std::size_t offset, std::size_t bytes) const {
  std::vector<Span> found;
  std::size_t at = 0;  // where the span begins in the slot
  for (const Span& span : spans_) {
    const std::size_t begin = std::max(at, offset);
    const std::size_t end = std::min(at + span.bytes, offset + bytes);
    if (begin < end) found.push_back({span.tier, span.begin + (begin - at), end - begin});
    at += span.bytes;
  }
  return found;
}

void Slot::write(const Pieces& pieces) const {
  std::size_t at = 0;
  for (const Span& span : spans_) {
    span.tier->write(span.begin, within(pieces, at, span.bytes));
    at += span.bytes;
  }
}

void Slot::read(const Pieces& pieces) const {
  std::size_t at = 0;
  for (const Span& span : spans_) {
    span.tier->read(span.begin, within(pieces, at, span.bytes));
    at += span.bytes;
  }
}

}  // namespace fold3d::memory
