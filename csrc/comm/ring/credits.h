#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace fold3d::comm {

class RingConnection;

/// What became of the bytes that were sent over one connection, or over several together.
struct SendQueue {
  std::uint64_t arrived = 0;  ///< since the beginning, as far as is known here
  std::size_t waiting = 0;    ///< have not begun to travel
  bool is_empty = true;       ///< all have arrived
  bool is_known = true;       ///< false: what was sent counts as arrived when the next slice is to be sent
};

/// Measures the speed of one connection, or of several that share a card, from their sender: bytes that have arrived
/// over the time in which there was something to send and the line was full, in windows of about a tenth of a second.
/// The fastest of the last windows counts: in the others the receiver may have been busy with something else. One
/// thread at a time; slices of several connections may be sent at once.
class BandwidthMeter {
 public:
  /// A slice is about to be sent.
  void begins(std::int64_t now_ns, const SendQueue& queue);
  /// It is in the system's buffer. Returns whether a window ended.
  bool ends(std::int64_t now_ns, std::size_t bytes, const SendQueue& queue);

  /// Of the last window that ended, bytes per second.
  double last() const { return windows_[(next_window_ + windows_.size() - 1) % windows_.size()]; }
  /// Bytes per second; 0.0 until enough went over to tell.
  double bandwidth() const;
  /// The mean over all windows, the last twenty or so counting most: what goes over in the end, with what slows single
  /// windows down. 0.0 until one has ended.
  double sustained() const { return sustained_; }

 private:
  void restart(std::int64_t now_ns, const SendQueue& queue);
  std::uint64_t arrived(const SendQueue& queue) const { return queue.is_known ? queue.arrived : sent_; }

  int sending_ = 0;                       // slices
  std::uint64_t sent_ = 0, arrived_ = 0;  // bytes; arrived_: at since_ns_
  std::int64_t since_ns_ = 0;
  bool answered_ = false;               // since the line was empty
  double bytes_ = 0.0, time_ns_ = 0.0;  // of the window under way
  std::array<double, 8> windows_{};     // those before it, bytes per second
  std::size_t next_window_ = 0;
  double sustained_ = 0.0;
  int measured_ = 0;  // windows
};

/// How much data-parallel traffic may be on its way at once. A pipeline message waits for what a slice has put on the
/// network card before it, so slices follow the speed of the card: a slice is worth 1 ms, what waits in the system's
/// buffers to be sent 0.4 ms. Shared by the lines of one rank, whose speed is measured together: what one of them gets
/// while others send is no speed of the card. Thread-safe.
class Credits {
 public:
  /// `slice_bytes`: a fixed size of the slices; 0: by the speed. `lines`: on how many of them one bucket travels.
  explicit Credits(std::size_t slice_bytes, int lines = 1) : fixed_(slice_bytes), lines_(lines) {}

  /// A line of this rank, measured from now on; before any thread sends.
  void add(std::shared_ptr<const RingConnection> line) { measured_.push_back(std::move(line)); }
  /// A slice is about to be sent on one of them; it is in the system's buffer.
  void begins();
  void ends(std::size_t bytes);

  /// The speed is this, in bytes per second.
  void set_bandwidth(double bytes_per_second) { bandwidth_.store(bytes_per_second, std::memory_order_relaxed); }
  /// 0.0 as long as it is not known.
  double bandwidth() const { return bandwidth_.load(std::memory_order_relaxed); }
  /// What all lines together bring over in the long run, in bytes per second; 0.0 as long as it is not known.
  double sustained() const;

  /// Bytes of a slice of one line: a multiple of 64.
  std::size_t slice_bytes() const;
  /// What may wait in the system's buffer of one line to be sent; 0: leave it to the system.
  std::size_t waiting_bytes() const;

  /// What a pipeline message may find ahead of it at this speed, in bytes per second: a slice, and what lies in the
  /// system's buffers. For planning. Throws std::invalid_argument for a speed that is not positive and finite.
  static std::size_t pause_bytes(double bytes_per_second);

 private:
  SendQueue queue() const;

  const std::size_t fixed_;
  const int lines_;
  std::vector<std::shared_ptr<const RingConnection>> measured_;
  mutable std::mutex mutex_;  // guards meter_
  BandwidthMeter meter_;
  std::atomic<double> bandwidth_{0.0};
};

/// How much of one connection may be in flight: two round trips' worth, so that it never starves, and something for
/// what the hosts are late. How much that must be, nobody can derive: first 0.4 ms, doubled when the speed is below
/// that without a limit, and halved again after some time. Sender's thread.
class FlightLimit {
 public:
  /// A window of the meter has ended, in which so many bytes per second went over. `alone`: nothing more urgent wanted
  /// the card.
  void measured(double speed, bool alone);
  /// At this speed, on a connection with this round trip; 0: as many as the system likes, as in the first windows.
  std::size_t bytes(double speed, double round_trip_seconds) const;

 private:
  static constexpr double kLeastSeconds = 4e-4;

  double seconds_ = kLeastSeconds;
  double free_ = 0.0, average_ = 0.0;  // speeds: without a limit, and now
  int windows_ = 0;                    // since the limit was set
};

}  // namespace fold3d::comm
