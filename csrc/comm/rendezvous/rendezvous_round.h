#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

#include "comm/rendezvous/pending_peer.h"
#include "comm/rendezvous/tcp_connector.h"
#include "comm/rendezvous/tcp_rendezvous.h"

namespace fold3d::comm {

/// One TcpRendezvous::meet(): all calls and everybody at the rendezvous are heard at the same time, so nobody waits for
/// another, and of strangers there are never more than so many.
class RendezvousRound {
 public:
  using Clock = TcpSocket::Clock;
  static constexpr std::size_t kMostStrangers = 128;

  RendezvousRound(const TcpRendezvous& rendezvous, const std::vector<TcpRendezvous::Call>& calls,
                  const std::vector<ConnectionId>& guests, Clock::time_point deadline);

  /// As TcpRendezvous::meet(); once.
  TcpRendezvous::Connections run();

 private:
  bool done() const;
  void wait();
  void open();
  void hear();
  [[noreturn]] void throw_late() const;

  const TcpRendezvous& rendezvous_;
  const std::vector<ConnectionId> expected_;
  const Clock::time_point deadline_;
  std::vector<TcpConnector> callers_;
  std::deque<PendingPeer> strangers_;                 // the oldest first
  std::vector<std::unique_ptr<TcpSocket>> incoming_;  // [guest]
  Clock::time_point door_rests_;                      // until then nobody is let in
};

}  // namespace fold3d::comm
