#pragma once

#include <cstdint>
#include <vector>

#include "core/network/event_queue.h"
#include "core/network/hold_rule.h"

namespace fold3d::core {

/// The network of a simulated cluster: a card per host that sends one thing and receives one thing at a time at
/// `bandwidth`; a transfer holds the sender's out side and the receiver's in side while it lasts.
///
/// Two kinds of traffic. Pipeline messages travel whole and go first. Data-parallel flows travel in slices and may
/// be paused at every slice border: for messages, as the HoldRule says, and for flows of higher priority; flows of
/// equal priority take turns of one or more slices. An undisturbed stretch of slices is one event ("burst"), shortened
/// to the next slice border when somebody else comes. Without preemption whoever was ready first goes first, and a flow
/// is not interrupted.
class Network {
 public:
  struct Options {
    double bandwidth = 0;  ///< bytes per second, each way
    std::int64_t slice_bytes = 0;
    bool preempt = true;
    HoldRule::Options rule;
  };
  /// One stretch of time in which `bytes` left.
  struct Sent {
    int from = 0;
    int to = 0;
    bool message = false;
    int token = 0;  ///< what send_message or start_flow was given
    std::int64_t start = 0;
    std::int64_t end = 0;
    std::int64_t bytes = 0;
    bool finished = false;  ///< the last byte of the message or flow has left
  };
  struct Counters {
    std::int64_t preemptions = 0;      ///< bursts shortened for a message
    std::int64_t longest_wait_ns = 0;  ///< the longest that a message waited for the cards
    std::int64_t total_wait_ns = 0;    ///< the sum over all messages
    std::int64_t message_bytes = 0;
    std::int64_t flow_bytes = 0;
  };

  Network(int num_hosts, const Options& options, EventQueue& events);

  /// Queues a pipeline message of at least one byte. bandwidth: bytes per second of this one; 0: that of the cards.
  void send_message(std::int64_t now, int from, int to, std::int64_t bytes, int token, double bandwidth = 0);
  /// Queues a data-parallel flow of at least one byte; lower `priority` goes first. from == to is a card that
  /// sends to and receives from its likes on other hosts.
  void start_flow(std::int64_t now, int from, int to, std::int64_t bytes, int priority, int token);
  /// Handles kMessageSent, kBurstSent and kNetworkWake. Returns false if nothing was sent (a wake, or a burst
  /// that has been shortened since). The freed cards stay free until start_what_can(): the caller first queues what
  /// follows from it.
  bool handle(const Event& event, Sent& sent);

  /// Starts every waiting message and flow that may start.
  void start_what_can(std::int64_t now);

  const Counters& counters() const { return counters_; }
  /// Nanoseconds that `bytes` take.
  std::int64_t duration(std::int64_t bytes) const { return duration(bytes, options_.bandwidth); }
  /// Bytes that a host's card has sent until `now`.
  double sent_until(int host, std::int64_t now) const;

 private:
  struct Message {
    int from, to, token;
    std::int64_t bytes, duration, queued, started;
  };
  struct Flow {
    int from, to, token, priority;
    std::int64_t left, ready;  // bytes not yet sent; since when the next slice could go
    std::int64_t started = 0;  // the current burst
    std::int64_t burst = 0;    // its bytes; 0 = none under way
    std::int64_t until = 0;
    int version = 0;  // of the burst's end
  };
  struct Side {  // of a card
    bool busy = false;
    int flow = -1;  // whose burst keeps it busy
    HoldRule::Pipeline pipeline;
  };
  struct Account {                                 // of what a card sends
    double sent = 0;                               // by what has ended
    std::int64_t since = 0, until = 0, bytes = 0;  // of what is on its way
  };

  static constexpr std::int64_t kTurns = 16;  // that what is left of a flow would take

  static std::int64_t duration(std::int64_t bytes, double bandwidth);
  void on_its_way(int host, std::int64_t since, std::int64_t until, std::int64_t bytes);
  void has_left(int host, std::int64_t bytes);
  bool start_message(std::int64_t now, int number);
  bool start_burst(std::int64_t now, int number);
  void wait_in_line(int flow);
  void shorten(std::int64_t now, const Side& side, bool for_message);
  std::int64_t turn_of(const Flow& flow) const;
  Side& out(int host) { return out_[static_cast<std::size_t>(host)]; }
  Side& in(int host) { return in_[static_cast<std::size_t>(host)]; }
  std::int64_t allowed_from(const Flow& flow) const;

  Options options_;
  HoldRule rule_;
  EventQueue& events_;
  std::vector<Side> out_;
  std::vector<Side> in_;
  std::vector<Account> accounts_;  // by host
  std::vector<Message> messages_;
  std::vector<Flow> flows_;
  std::vector<int> waiting_messages_;  // in order of queueing
  std::vector<int> waiting_flows_;     // in order of (priority, ready); without preemption, of ready
  std::int64_t next_wake_ = -1;
  Counters counters_;
};

}  // namespace fold3d::core
