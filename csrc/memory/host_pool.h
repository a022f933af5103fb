#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "memory/slot/slot.h"
#include "memory/slot/tier.h"

namespace fold3d::memory {

struct PoolCounters {
  std::int64_t bytes = 0;   ///< reserved
  std::int64_t in_use = 0;  ///< of slots
  std::int64_t peak = 0;    ///< of in_use, since begin()
};

/// Slots for what leaves the device. Thread-safe.
class HostPool {
 public:
  /// Reserves so many bytes, a multiple of Tier::kAlignment; throws PoolError.
  using MakeTier = std::function<std::shared_ptr<Tier>(std::size_t)>;

  /// `bytes`: reserved at once, and never more; 0: what reserve() asks for.
  HostPool(MakeTier make, std::size_t bytes);
  ~HostPool();

  /// Whether it was made without a size.
  bool grows() const { return grows_; }

  /// Makes room for slots of so many bytes in all besides those in use, if it grows and has less. Throws PoolError.
  void reserve(std::size_t bytes);

  /// A run begins: the peak is counted anew.
  void begin();

  /// A slot of at least `bytes`; none if less is free now. It does not grow.
  Slot try_take(std::size_t bytes);

  /// A slot of at least `bytes`. Throws PoolError, which names `user`, if less is free.
  Slot take(std::size_t bytes, const std::string& user);

  PoolCounters counters() const;

 private:
  struct State;
  MakeTier make_;
  bool grows_;
  std::shared_ptr<State> state_;
};

}  // namespace fold3d::memory
