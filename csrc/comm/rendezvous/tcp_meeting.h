#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

#include "comm/rendezvous/tcp_caller.h"
#include "comm/rendezvous/tcp_door.h"
#include "comm/rendezvous/tcp_guest.h"

namespace fold3d::comm {

/// One TcpDoor::meet(): all calls and everybody at the door are heard at the same time, so nobody waits for another,
/// and of strangers there are never more than so many.
class TcpMeeting {
 public:
  using Clock = TcpSocket::Clock;
  static constexpr std::size_t kMostStrangers = 128;

  TcpMeeting(const TcpDoor& door, const std::vector<TcpDoor::Call>& calls, const std::vector<Line>& guests,
             Clock::time_point deadline);

  /// As TcpDoor::meet(); once.
  TcpDoor::Connections run();

 private:
  bool done() const;
  void wait();
  void open();
  void hear();
  [[noreturn]] void throw_late() const;

  const TcpDoor& door_;
  const std::vector<Line> expected_;
  const Clock::time_point deadline_;
  std::vector<TcpCaller> callers_;
  std::deque<TcpGuest> strangers_;                    // the oldest first
  std::vector<std::unique_ptr<TcpSocket>> incoming_;  // [guest]
  Clock::time_point door_rests_;                      // until then nobody is let in
};

}  // namespace fold3d::comm
