#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "simdevice/core/footprint.h"
#include "simdevice/core/vector_clock.h"

namespace simdevice {

/// Number of the host, in the place of a stream's.
constexpr int kHost = -1;

/// One kernel's use of a block, or the host's.
struct Use {
  Footprint bytes;
  bool writes = false;
  int stream = kHost;
  std::uint64_t tick = 0;
  std::string what;  // operator, and the line that launched it
};

/// The uses of one block of memory that a later one may still race with. Not thread-safe.
class History {
 public:
  /// Adds a use that comes after what `seen` has seen. Returns a description of the first race with an earlier use:
  /// both touch a byte, one of them writes, and nothing orders the earlier before the later; empty if there is none.
  /// `base`: the block's first byte.
  std::string add(const Use& use, const VectorClock& seen, std::uintptr_t base);

  /// As add(), for the host, which leaves no trace: what it launches later comes after it anyway.
  std::string check(const Use& use, const VectorClock& seen, std::uintptr_t base) const;

  /// Forgets what `seen` has seen: all later uses come after it.
  void forget(const VectorClock& seen);

  std::size_t size() const { return uses_.size(); }

 private:
  std::vector<Use> uses_;
};

}  // namespace simdevice
