#include "comm/rendezvous/tcp_rendezvous.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "comm/base/errors.h"
#include "comm/rendezvous/rendezvous_round.h"
#include "comm/socket/tcp_address.h"

namespace fold3d::comm {
namespace {

constexpr int kBacklog = 4096;  // the system takes less where it allows less: strangers may come before the meeting

}  // namespace

TcpRendezvous::TcpRendezvous(const std::string& host, Job job)
    : job_(std::move(job)), handshake_(job_.secret, job_.name), endpoint_{host, 0} {
  const TcpAddress address(endpoint_);
  listener_ = std::make_unique<TcpSocket>(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (listener_->fd() < 0 || ::bind(listener_->fd(), address.get(), address.size()) != 0 ||
      ::listen(listener_->fd(), kBacklog) != 0) {
    throw CommError("cannot listen on " + host + ": " + std::strerror(errno));
  }
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  ::getsockname(listener_->fd(), reinterpret_cast<sockaddr*>(&bound), &size);
  endpoint_.port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(bound).sin6_port
                                                     : reinterpret_cast<sockaddr_in&>(bound).sin_port);
}

TcpRendezvous::~TcpRendezvous() = default;

TcpRendezvous::Connections TcpRendezvous::meet(const std::vector<Call>& calls, const std::vector<ConnectionId>& guests,
                                               Clock::time_point deadline) {
  const auto patience = deadline - Clock::now();
  Connections found = RendezvousRound(*this, calls, guests, deadline).run();
  for (const auto* sockets : {&found.outgoing, &found.incoming}) {
    for (const auto& socket : *sockets) socket->give_up_after(patience);
  }
  return found;
}

void TcpRendezvous::abort(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (aborted_) return;
  aborted_ = true;
  reason_ = reason;
  listener_->shutdown();  // wakes the meeting
}

void TcpRendezvous::check_aborted() const {
  const std::lock_guard lock(mutex_);
  if (aborted_) throw AbortedError(reason_);
}

}  // namespace fold3d::comm
