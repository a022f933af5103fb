#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "comm/ring/credits.h"

namespace fold3d::comm {

/// One line around a ring of ranks: to the next member and from the previous one, in host memory. Each slice is a
/// header and a payload; the receiver asks for exactly these pieces, in the order sent.
///
/// Threads: send() from one, recv() from another, abort() from any. Calls block for as long as the peers take; abort()
/// ends them promptly. Any exception ends the stream; its text becomes the cause in the error.
class RingConnection {
 public:
  virtual ~RingConnection() = default;

  /// Returns when the memory may be reused.
  virtual void send(std::span<const std::byte> header, std::span<const std::byte> payload) = 0;
  /// Fills all of `bytes`: a header, or a payload, or a part of one if can_split().
  virtual void recv(std::span<std::byte> bytes) = 0;
  /// All blocked and later calls throw AbortedError(reason). Idempotent, the first reason stays.
  virtual void abort(const std::string& reason) noexcept = 0;

  /// Whether a payload may be received part by part.
  virtual bool can_split() const { return false; }
  /// What became of the bytes that send() took. From any thread.
  virtual SendQueue queue() const { return {.is_known = false}; }
  /// Shortest time to the next member and back; 0.0 where nobody knows.
  virtual double round_trip_seconds() const { return 0.0; }
  /// A hint: send() hands over bytes only while fewer than `bytes` have not begun to travel, then `at_once` of them.
  virtual void limit_waiting([[maybe_unused]] std::size_t bytes, [[maybe_unused]] std::size_t at_once) {}
  /// A hint: the previous member may have so many bytes on their way here; 0: as many as the system likes.
  virtual void limit_window(std::size_t) {}
  /// A hint: nobody is going to read for a while; until open_window() hardly more is to come than is on its way. From
  /// the thread that receives.
  virtual void close_window() {}
  virtual void open_window() {}
};

}  // namespace fold3d::comm
