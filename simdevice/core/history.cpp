#include "simdevice/core/history.h"

#include <algorithm>

namespace simdevice {

namespace {

std::string name_of(const Use& use) {
  const std::string who = use.stream == kHost ? "the host" : "stream " + std::to_string(use.stream);
  return use.what + " (" + who + (use.writes ? ", writes)" : ", reads)");
}

bool is_ordered(const Use& earlier, const Use& later, const VectorClock& seen) {
  return earlier.stream == later.stream || seen.has_seen(static_cast<std::size_t>(earlier.stream), earlier.tick);
}

std::string describe(const Use& earlier, const Use& later, std::uintptr_t base) {
  const auto begin = std::max(earlier.bytes.begin, later.bytes.begin) - base;
  const auto end = std::min(earlier.bytes.end, later.bytes.end) - base;
  return "data race on the simulated device: " + name_of(later) + " is not ordered after " + name_of(earlier) +
         "; both touch bytes " + std::to_string(begin) + " to " + std::to_string(end) + " of one block";
}

bool conflict(const Use& earlier, const Use& later) {
  return (earlier.writes || later.writes) && overlap(earlier.bytes, later.bytes);
}

}  // namespace

std::string History::check(const Use& use, const VectorClock& seen, std::uintptr_t base) const {
  for (const Use& earlier : uses_) {
    if (conflict(earlier, use) && !is_ordered(earlier, use, seen)) return describe(earlier, use, base);
  }
  return {};
}

std::string History::add(const Use& use, const VectorClock& seen, std::uintptr_t base) {
  std::string race = check(use, seen, base);
  // Whoever comes after this use comes after what it covers, or is reported for this one as well.
  std::erase_if(uses_, [&](const Use& earlier) {
    if (!covers(use.bytes, earlier.bytes)) return false;
    return use.writes || (!earlier.writes && earlier.stream == use.stream);
  });
  uses_.push_back(use);
  return race;
}

void History::forget(const VectorClock& seen) {
  std::erase_if(uses_, [&](const Use& use) { return seen.has_seen(static_cast<std::size_t>(use.stream), use.tick); });
}

}  // namespace simdevice
