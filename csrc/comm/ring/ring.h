#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/arbiter/nic_arbiter.h"
#include "comm/arbiter/turn.h"
#include "comm/base/failure.h"
#include "comm/ring/credits.h"
#include "comm/ring/exchange.h"
#include "comm/ring/flow.h"
#include "comm/ring/ring_connection.h"
#include "core/network/hosts.h"

namespace fold3d::comm {

/// Runs exchanges in host memory around a ring of ranks, one after the other in the order in which they are pushed,
/// which is the same on all of them. DP.sync has two, for reduce-scatters and for all-gathers of buckets; TP.sync has
/// one.
///
/// An exchange travels in slices: a byte of round s may be sent as soon as the same byte of round s - 1 was received,
/// and sending runs into the next exchange while this one still receives, so a row of them keeps the line busy. How
/// they take their turn on the host's card is the arbiter's rule for the ring's traffic: TP.sync is announced, DP.sync
/// asks before each slice that is sent and each payload that is received. What stays within a host does neither.
///
/// Results do not depend on time or on how slices are cut, to the bit.
///
/// Two threads of its own: one sends, one receives. All calls from any thread.
class Ring final {
 public:
  using Traffic = NicArbiter::Traffic;

  struct Options {
    int rank = 0;  ///< of this member, [0, size)
    int size = 2;  ///< members, >= 2
    Traffic traffic = Traffic::kReduce;
    core::Hosts hosts = {};  ///< of each member
    /// Decide how long slices are and how much may be on its way, by the speed that is measured; null: slices follow
    /// the length of a round, and all the connection takes is on its way.
    std::shared_ptr<Credits> credits = nullptr;
  };

  /// One exchange as it happened on this rank; times are std::chrono::steady_clock nanoseconds.
  struct Record {
    Exchange::Kind kind = Exchange::Kind::kAllReduce;
    int bucket = Exchange::kNoBucket;
    std::int64_t issued_ns = 0;
    std::int64_t start_ns = 0;  ///< its first slice began to be sent or received; 0: nothing travelled
    std::int64_t end_ns = 0;
    std::size_t bytes = 0;  ///< sent by this rank
  };

  /// Who is told. Calls come from the ring's threads, without any lock held.
  class Listener {
   public:
    virtual ~Listener() = default;
    /// The next exchange begins to travel.
    virtual void begun() {}
    /// The oldest exchange, pushed with `keep`, is done.
    virtual void completed(const Record& record, const std::shared_ptr<void>& keep) = 0;
    /// The ring has ended; not called after abort().
    virtual void failed(Failure::Kind kind, const std::string& text) = 0;
  };

  /// Throws std::invalid_argument for options out of range.
  Ring(Options options, std::shared_ptr<RingConnection> connection, std::shared_ptr<NicArbiter> arbiter);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  /// Once, before anything else. `listener` lives until stop() has returned.
  void start(Listener& listener);
  /// Queues an exchange; returns its number, from 0. `keep` is let go of when nothing touches its memory any more.
  /// Never blocks.
  std::uint64_t push(Exchange exchange, std::shared_ptr<void> keep);
  /// Ends the ring: nothing completes any more. Idempotent, the first reason stays.
  void abort(const std::string& reason) noexcept;
  /// Aborts, and returns when the threads have ended.
  void stop() noexcept;

  /// How errors call an exchange; empty when it is done.
  std::string name_of(std::uint64_t number) const;
  /// What the oldest exchange waits for, for error messages; empty when there is none.
  std::string waits_for() const;

 private:
  /// Positions are bytes of the tensors, counted over all rounds. Guarded by mutex_ but for what is fixed.
  struct Job {
    Exchange exchange;
    std::shared_ptr<void> keep;
    std::vector<std::size_t> sends, receives;  // where each round begins, and the end
    std::size_t sent = 0, received = 0;
    bool is_prepared = false;  // by the receiver, which finishes it, too
    bool is_finished = false;
    std::int64_t issued_ns = 0, start_ns = 0;

    std::size_t to_send() const { return sends.back(); }
    std::size_t to_receive() const { return receives.back(); }
  };
  /// Where in an exchange a slice lies.
  struct Place {
    std::size_t round = 0, offset = 0, left = 0;  // bytes of the round behind the offset
  };
  static Place place_of(const std::vector<std::size_t>& begins, std::size_t position);

  void send_loop();
  std::size_t sendable(const Job& job, Place& place) const;
  void send_slice(Job& job, std::uint64_t number, const Place& place, std::size_t length, Turn& turn);
  void recv_loop();
  std::size_t recv_slice(Job& job, std::uint64_t number, const Place& place, Turn& turn);
  void recv_payload(const Exchange& exchange, const Exchange::Receipt& receipt, std::size_t offset, std::size_t length);

  Job& job(std::uint64_t number) { return jobs_[static_cast<std::size_t>(number - first_)]; }
  void begin(Job& job);
  void finish(std::unique_lock<std::mutex>& lock);
  void guard(void (Ring::*loop)(), const std::uint64_t& number) noexcept;
  std::string member(int rank) const;
  int next() const { return (options_.rank + 1) % options_.size; }
  int previous() const { return (options_.rank + options_.size - 1) % options_.size; }

  const Options options_;
  const bool sends_by_card_, receives_by_card_;
  const std::shared_ptr<RingConnection> connection_;
  const std::shared_ptr<NicArbiter> arbiter_;
  Listener* listener_ = nullptr;
  std::optional<Flow> flow_;         // sender; with credits
  std::vector<std::byte> outgoing_;  // sender: what travels of a slice, where it does not lie so in memory
  std::vector<std::byte> incoming_;  // receiver: likewise
  std::uint64_t granted_ = 0;        // receiver: what the previous member may have on its way

  mutable std::mutex mutex_;
  std::condition_variable may_send_, may_recv_;
  std::deque<Job> jobs_;         // oldest first; references stay valid while others are pushed
  std::uint64_t first_ = 0;      // number of jobs_.front()
  std::uint64_t sending_ = 0;    // number of the job that is sent
  std::uint64_t receiving_ = 0;  // and of the one that is received
  bool completing_ = false;      // one of the threads tells the listener
  bool stopped_ = false;

  std::thread sender_, receiver_;
};

}  // namespace fold3d::comm
