#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/rendezvous/handshake.h"
#include "comm/socket/tcp_socket.h"

namespace fold3d::comm {

/// How ranks of a job find each other over TCP: each listens at its rendezvous, calls at others' and lets in only who
/// knows the job's secret (Handshake). What travels afterwards is not encrypted. abort() from any thread.
class TcpRendezvous {
 public:
  using Clock = TcpSocket::Clock;

  /// What the ranks of one rendezvous have in common.
  struct Job {
    std::string secret;           ///< at least 32 characters
    std::string name = {};        ///< told to nobody, but the same on all ranks
    std::string peers = "stage";  ///< what a rank is called in errors
  };
  struct Call {
    Endpoint to;
    ConnectionId line;
  };
  /// In the order of the calls, and of the guests.
  struct Connections {
    std::vector<std::unique_ptr<TcpSocket>> outgoing, incoming;
  };

  /// Listens on a free port of `host`, a numeric address. Throws CommError when the address or the secret cannot be
  /// used.
  TcpRendezvous(const std::string& host, Job job);
  ~TcpRendezvous();

  const Endpoint& endpoint() const { return endpoint_; }

  /// Makes all `calls` and lets in all `guests`, in whatever order they come; strangers are shown out and hold up
  /// nobody. The other ends do the same in the meantime. A connection later breaks when its other end's host has been
  /// silent for as long as the meeting may take.
  /// Throws TimeoutError at the deadline, ProtocolError when a stranger listens where a rank should, AbortedError, and
  /// CommError as soon as a rank cannot be reached for good: it listened before, so nobody waits for its return.
  Connections meet(const std::vector<Call>& calls, const std::vector<ConnectionId>& guests, Clock::time_point deadline);

  /// Ends the present and later meetings with AbortedError(reason). Idempotent; the first reason stays.
  void abort(const std::string& reason) noexcept;

 private:
  friend class RendezvousRound;
  void check_aborted() const;

  const Job job_;
  const Handshake handshake_;
  Endpoint endpoint_;
  std::unique_ptr<TcpSocket> listener_;

  mutable std::mutex mutex_;  // guards what follows
  bool aborted_ = false;
  std::string reason_;
};

}  // namespace fold3d::comm
