#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace fold3d::comm {

/// How much data-parallel traffic may be on its way at once. A pipeline message waits for what a slice has put on the
/// network card before it, so slices and buffers follow the speed of the connection: a slice is worth 1 ms, what lies
/// in the system's buffers 0.4 ms and two round trips. Shared by the streams of one rank. Thread-safe.
class Credits {
 public:
  /// `slice_bytes`: a fixed size of the slices; 0: by the speed.
  explicit Credits(std::size_t slice_bytes) : fixed_(slice_bytes) {}

  /// The speed was measured, in bytes per second.
  void set_bandwidth(double bytes_per_second) { bandwidth_.store(bytes_per_second, std::memory_order_relaxed); }
  /// 0.0 as long as it is not known.
  double bandwidth() const { return bandwidth_.load(std::memory_order_relaxed); }

  /// Bytes of a slice: a multiple of 64.
  std::size_t slice_bytes() const;
  /// What may lie in the system's buffers on each side of a connection with this round trip; 0: leave it to the system.
  std::size_t buffer_bytes(double round_trip_seconds) const;

  /// What a pipeline message may find ahead of it at this speed, in bytes per second: a slice, and what lies in the
  /// system's buffers. For planning. Throws std::invalid_argument for a speed that is not positive and finite.
  static std::size_t pause_bytes(double bytes_per_second);

 private:
  const std::size_t fixed_;
  std::atomic<double> bandwidth_{0.0};
};

/// Measures the speed of one connection from its sender: bytes that have left the machine over the time in which there
/// were any to send, in windows of about a tenth of a second. The fastest of the last windows counts: in the others the
/// receiver may have been busy with something else. One thread.
class BandwidthMeter {
 public:
  /// A slice is about to be sent. `unsent`: bytes sent before that still lie in the system's buffer.
  void begins(std::int64_t now_ns, std::size_t unsent);
  /// It is in the system's buffer. `unsent` as above.
  void ends(std::int64_t now_ns, std::size_t bytes, std::size_t unsent);

  /// Bytes per second; 0.0 until enough went over to tell.
  double bandwidth() const;

 private:
  double bytes_ = 0.0, time_ns_ = 0.0;  // of the window under way
  std::array<double, 8> windows_{};     // those before it, bytes per second
  std::size_t next_window_ = 0;
  std::int64_t since_ns_ = 0;
  std::size_t unsent_ = 0;  // at since_ns_
};

}  // namespace fold3d::comm
