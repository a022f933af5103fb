#include "memory/slot/slots.h"

#include <iterator>
#include <stdexcept>
#include <string>

namespace fold3d::memory {

Slots::Slots(std::size_t bytes) {
  if (bytes > 0) add(0, bytes);
}

void Slots::add(std::size_t begin, std::size_t bytes) {
  parts_.emplace(begin, bytes);
  by_size_.emplace(bytes, begin);
  free_ += bytes;
}

void Slots::remove(std::map<std::size_t, std::size_t>::iterator part) {
  const auto [from, to] = by_size_.equal_range(part->second);
  for (auto each = from; each != to; ++each) {
    if (each->second != part->first) continue;
    by_size_.erase(each);
    break;
  }
  free_ -= part->second;
  parts_.erase(part);
}

std::optional<std::size_t> Slots::take(std::size_t bytes) {
  const auto fits = by_size_.lower_bound(bytes);
  if (fits == by_size_.end()) return std::nullopt;
  const auto [size, begin] = *fits;
  remove(parts_.find(begin));
  if (size > bytes) add(begin + bytes, size - bytes);
  return begin;
}

void Slots::give_back(std::size_t begin, std::size_t bytes) {
  const auto after = parts_.lower_bound(begin);
  std::size_t first = begin;
  std::size_t end = begin + bytes;
  const bool overlaps_after = after != parts_.end() && after->first < end;
  const bool has_before = after != parts_.begin();
  const auto before = has_before ? std::prev(after) : parts_.end();
  if (overlaps_after || (has_before && before->first + before->second > begin)) {
    throw std::logic_error("a slot of " + std::to_string(bytes) + " bytes at " + std::to_string(begin) +
                           " was given back that is free");
  }
  if (after != parts_.end() && after->first == end) {
    end += after->second;
    remove(after);
  }
  if (has_before && before->first + before->second == begin) {
    first = before->first;
    remove(before);
  }
  add(first, end - first);
}

}  // namespace fold3d::memory
