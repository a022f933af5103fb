#pragma once

#include <string>

#include "comm/arbiter/nic_arbiter.h"
#include "comm/base/failure.h"
#include "comm/bucket/collective.h"

namespace fold3d::comm {

/// A FIFO of collectives of one kind: reduce-scatters or all-gathers. Every replica pushes the same ones in the same
/// order. Thread-safe.
class CollectiveStream {
 public:
  /// Who is told. Calls come from the stream's threads, without any lock held.
  class Listener {
   public:
    virtual ~Listener() = default;
    /// What the collective that is under way on a device brings may be used, by streams that wait for the mark which
    /// its buffer carries.
    virtual void usable(NicArbiter::Traffic traffic, int bucket) = 0;
    /// It is done, and may be used if that was not said before.
    virtual void completed(const CollectiveRecord& record) = 0;
    /// The stream has ended; not called after abort().
    virtual void failed(Failure::Kind kind, const std::string& text) = 0;
  };

  virtual ~CollectiveStream() = default;

  /// Once, before anything else. `listener` lives until stop() has returned.
  virtual void start(Listener& listener) = 0;
  /// Queues a collective that check_collective() accepts. Never blocks.
  virtual void push(Collective collective) = 0;
  /// Ends the stream: nothing completes any more. Idempotent, the first reason stays.
  virtual void abort(const std::string& reason) noexcept = 0;
  /// Aborts, and returns when the stream's threads have ended.
  virtual void stop() noexcept = 0;
  /// What the oldest collective waits for, for error messages; empty when there is none.
  virtual std::string waits_for() const = 0;
  /// Whether that is what this rank itself has to compute before: the time of that is no wait for others.
  virtual bool waits_for_own_rank() const { return false; }
};

}  // namespace fold3d::comm
