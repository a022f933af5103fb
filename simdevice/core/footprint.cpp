#include "simdevice/core/footprint.h"

#include <algorithm>
#include <utility>

namespace simdevice {

Footprint footprint_of(std::uintptr_t begin, const std::vector<std::int64_t>& sizes,
                       const std::vector<std::int64_t>& strides, std::int64_t element_bytes) {
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride, size; both in elements
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > 1 && strides[i] > 0) dims.emplace_back(strides[i], sizes[i]);
  }
  std::sort(dims.begin(), dims.end());
  std::int64_t last = 0;  // offset of the last element
  for (const auto& [stride, size] : dims) last += (size - 1) * stride;
  Footprint out{begin, begin + static_cast<std::uintptr_t>((last + 1) * element_bytes), 0, 0};
  std::size_t next = 0;
  std::int64_t width = 1;
  for (; next < dims.size() && dims[next].first <= width; ++next) {
    width = std::max(width, (dims[next].second - 1) * dims[next].first + width);
  }
  if (next == dims.size()) {
    out.pitch = out.width = out.end - out.begin;
    return out;
  }
  const std::int64_t pitch = dims[next].first;
  std::int64_t span = pitch * dims[next].second;
  for (++next; next < dims.size() && dims[next].first == span; ++next) span *= dims[next].second;
  if (next < dims.size()) {  // repetitions that are not evenly spaced
    out.pitch = out.width = out.end - out.begin;
    return out;
  }
  out.pitch = static_cast<std::uintptr_t>(pitch * element_bytes);
  out.width = static_cast<std::uintptr_t>(width * element_bytes);
  return out;
}

bool overlap(const Footprint& a, const Footprint& b) {
  if (a.end <= b.begin || b.end <= a.begin) return false;
  const auto& rows = a.is_dense() ? b : a;  // with a pitch, if one of them has one
  const auto& other = a.is_dense() ? a : b;
  if (rows.is_dense()) return true;
  if (!other.is_dense() && other.pitch != rows.pitch) return true;
  if (other.is_dense() && other.width >= rows.pitch) return true;
  // Where the other one's row begins, seen from the row of `rows` before it.
  const std::uintptr_t pitch = rows.pitch;
  const std::uintptr_t shift = (other.begin % pitch + pitch - rows.begin % pitch) % pitch;
  return shift < rows.width || shift + other.width > pitch;
}

bool covers(const Footprint& a, const Footprint& b) {
  if (a.is_dense()) return a.begin <= b.begin && b.end <= a.end;
  return a.begin == b.begin && a.end == b.end && a.pitch == b.pitch && a.width >= b.width;
}

}  // namespace simdevice
