#include "comm/rendezvous/pending_peer.h"

#include <algorithm>
#include <optional>
#include <span>

namespace fold3d::comm {

static_assert(sizeof(Digest) <= kGreetingBytes);

PendingPeer::State PendingPeer::advance(const Handshake& handshake,
                                        const std::function<bool(const ConnectionId&)>& wanted) {
  if (!greeted_) {
    if (socket_->recv_now(incoming_, got_) != 0) return State::kRefused;
    if (got_ < incoming_.size()) return State::kStranger;
    const std::optional<Greeting> greeting = read_greeting(incoming_);
    if (!greeting || !wanted(greeting->line)) return State::kRefused;
    greeting_ = *greeting;
    own_ = fresh_nonce();
    if (socket_->send_now(own_) != 0) return State::kRefused;
    greeted_ = true;
    got_ = 0;
  }
  const auto proof = std::span(incoming_).first<sizeof(Digest)>();
  if (socket_->recv_now(proof, got_) != 0) return State::kRefused;
  if (got_ < proof.size()) return State::kStranger;
  Digest said;
  std::copy(proof.begin(), proof.end(), said.begin());
  if (!same_digest(said, handshake.caller_proof(greeting_, own_))) return State::kRefused;
  // Two callers may have known the secret and wanted the same line: one that lost its connection and called again.
  if (!wanted(greeting_.line)) return State::kRefused;
  socket_->set_no_delay();
  return socket_->send_now(handshake.callee_proof(greeting_, own_)) == 0 ? State::kKnown : State::kRefused;
}

}  // namespace fold3d::comm
