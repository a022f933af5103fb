#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "comm/tcp_socket.h"

namespace fold3d::comm {

/// How ranks of a job find each other over TCP: each listens at its door, calls at others' and lets in only who knows
/// the job's secret. Whoever calls says one half of it and the number of the line it wants; whoever opens answers with
/// the other half; a stranger's connection is closed. What travels is not encrypted.
///
/// To connect in a circle without order: call() everybody, then open() for everybody, then confirm() the calls.
/// One thread at a time.
class TcpDoor {
 public:
  using Clock = TcpSocket::Clock;
  enum class Answer : std::uint8_t { kYes, kNone, kStranger };

  /// Listens on a free port of `host`, a numeric address. `secret`: the same text on all ranks, at least 32 characters.
  /// Throws CommError when the address cannot be used.
  TcpDoor(const std::string& host, std::string secret);
  ~TcpDoor();

  const Endpoint& endpoint() const { return endpoint_; }

  /// A connection to a rank that listens, which may not have accepted it yet. Null, with errno set, when that failed
  /// before the deadline.
  std::unique_ptr<TcpSocket> call(const Endpoint& to, std::uint8_t line, Clock::time_point deadline) const;
  /// The next caller who knows the secret and wants a line that `wanted` accepts, and that line. Null when the deadline
  /// passed.
  std::unique_ptr<TcpSocket> open(const std::function<bool(std::uint8_t)>& wanted, std::uint8_t& line,
                                  Clock::time_point deadline) const;
  /// Whether the rank that was called is one of the job.
  Answer confirm(const TcpSocket& called, std::uint8_t line, Clock::time_point deadline) const;

 private:
  const std::string secret_;
  Endpoint endpoint_;
  std::unique_ptr<TcpSocket> listener_;
};

}  // namespace fold3d::comm
