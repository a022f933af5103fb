#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace fold3d::comm {

/// Where a rank listens: a numeric address and a port.
struct Endpoint {
  std::string host;
  int port = 0;
};

/// Owns a connected or listening TCP socket; forked children do not keep it. Sending and receiving may come from two
/// threads at the same time, shutdown() from any.
class TcpSocket {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr int kClosedByPeer = -1;

  /// `fd`: -1 where the system gave none.
  explicit TcpSocket(int fd);
  ~TcpSocket();
  TcpSocket(const TcpSocket&) = delete;
  TcpSocket& operator=(const TcpSocket&) = delete;

  int fd() const { return fd_; }
  /// Ends blocked calls on it in any thread.
  void shutdown() const;
  /// Waits until one of `events` (as of poll) is there; false when the deadline passed before.
  bool ready(short events, Clock::time_point deadline) const;

  /// For greetings, which never wait. Sends a few bytes, on a connection that carries nothing yet; 0 or an errno value.
  int send_now(std::span<const std::byte> bytes) const;
  /// Fills `bytes`, of which `got` are there, as far as possible now. 0, an errno value, or kClosedByPeer.
  int recv_now(std::span<std::byte> bytes, std::size_t& got) const;
  /// What became of a connection that the system was to open: 0 or an errno value.
  int pending_error() const;
  /// Small messages travel at once.
  void set_no_delay() const;
  /// The connection breaks (ETIMEDOUT) when the peer's host has been silent for about so long, a second at least: with
  /// bytes on their way, by what it does not acknowledge; without, by probes. A process that is stopped does not count,
  /// whose host answers, unless it lets what was sent lie for as long.
  void give_up_after(Clock::duration silence) const;

  /// Sends both parts, one after the other; returns when they are in the system's buffers. 0, or what went wrong: an
  /// errno value. Ends only with the connection; shutdown() ends it.
  int send_all(std::span<const std::byte> first, std::span<const std::byte> second = {}) const;
  /// Fills `bytes`. 0, an errno value, or kClosedByPeer.
  int recv_all(std::span<std::byte> bytes) const;

  /// What the system says of the bytes that were sent.
  struct Progress {
    bool is_known = false;            ///< false: it says nothing
    std::uint64_t acknowledged = 0;   ///< by the peer, since the beginning
    std::size_t waiting = 0;          ///< have not begun to travel
    bool is_empty = true;             ///< all are acknowledged
    double round_trip_seconds = 0.0;  ///< the shortest seen
  };
  Progress progress() const;
  /// The peer may have no more than about `bytes` on their way here, but four segments: a receiver without room for
  /// whole segments makes its sender wait for timers. 0: as many as the system likes. May be raised again.
  void limit_window(std::size_t bytes);
  /// Until open_window() not many more bytes come than a limited window lets travel: a window closes only when the
  /// buffer is full, so the buffer is made small. Does nothing without a limit, and where the system could not be given
  /// the buffer back as it is. From the thread that receives.
  void close_window();
  void open_window();
  /// Sends only while fewer than about `bytes` have not begun to travel, whatever the buffer could take: then pieces of
  /// `at_once` bytes, if that is more. Each costs two calls of the system. From the thread that sends.
  void limit_waiting(std::size_t bytes, std::size_t at_once = 0);

 private:
  std::size_t segment_bytes() const;
  void set_buffer(std::size_t bytes) const;
  /// What may be asked for as a receive buffer, and be given back to the system later; 0: nothing.
  std::size_t most_buffer() const;

  const int fd_;
  std::size_t window_ = 0;                      // of whoever receives; 0: no limit
  std::size_t closed_buffer_ = 0;               // how large the buffer is with an open window; 0: it is open
  std::size_t most_waiting_ = 0, at_once_ = 0;  // of whoever sends; 0: no limit
  // Whether a packet that is not full may wait for what is sent next: the system would not ask for more while so little
  // may wait that one packet is half of it. Else each piece ends in a short packet, which is acknowledged by itself.
  bool fills_packets_ = false;
};

/// What an error of send_all or recv_all means.
std::string text_of_socket_error(int error);

}  // namespace fold3d::comm
