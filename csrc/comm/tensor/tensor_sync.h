#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/arbiter/nic_arbiter.h"
#include "comm/base/failure.h"
#include "comm/ring/ring_connection.h"
#include "comm/tensor/exchange.h"
#include "comm/tensor/exchange_header.h"
#include "comm/tensor/tensor_account.h"
#include "core/network/hosts.h"

namespace fold3d::comm {

/// TP.sync of one rank: exchanges of tensors in host memory among the ranks that share the weights of the same layers,
/// over a ring of connections, one after the other in the order in which they are issued, which is the same on all of
/// them. What is computed next waits for them, so they outrank PP.sync and DP.sync on the host's network card; what
/// stays within a host is neither announced there nor held.
///
/// An exchange travels in slices: a byte of round s may be sent as soon as the same byte of round s - 1 was received,
/// and sending runs into the next exchange while this one still receives. Results are the same whatever the timing.
///
/// Two threads of its own: one sends, one receives. All calls from any thread.
/// Errors: the first one is kept and ends everything; every pending and later call throws it again (CommError or a
/// subclass). There is no way back from the failed state.
class TensorSync final {
 public:
  struct Options {
    int rank = 0;                                ///< of this rank in its group
    int size = 2;                                ///< ranks of the group, >= 2
    core::Hosts hosts = {};                      ///< of each rank
    std::chrono::milliseconds timeout{300'000};  ///< longest blocking wait (setting comm_timeout), > 0
    std::string name = "this rank";              ///< how errors call it
    std::function<void()> while_waiting = {};    ///< called by who waits, every kLook; what it throws ends the wait
  };
  /// What an exchange is waited for by; they count from 0.
  using Ticket = std::uint64_t;

  /// Starts the threads. Throws std::invalid_argument for options out of range.
  TensorSync(Options options, std::shared_ptr<RingConnection> connection, std::shared_ptr<NicArbiter> arbiter);
  /// As close(). Never throws.
  ~TensorSync();
  TensorSync(const TensorSync&) = delete;
  TensorSync& operator=(const TensorSync&) = delete;

  /// Begins an exchange and returns at once. Nobody else writes to its memory, or reads its output, until it is waited
  /// for. `keep` is let go of when this object neither reads nor writes that memory any more: after an error that may
  /// be later than the end of the wait.
  Ticket issue(Exchange exchange, std::shared_ptr<void> keep = {});
  /// Returns when the exchange, and with it all before it, is complete on this rank. Blocks for at most `timeout`.
  void wait(Ticket ticket);
  /// Whether wait() would return at once.
  bool is_done(Ticket ticket);

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }

  /// What was exchanged, and how long this rank was in wait().
  const std::shared_ptr<TensorAccount>& account() const { return account_; }

  /// Ends everything; the first reason wins. Never throws.
  void abort(const std::string& reason) noexcept;
  /// Ends everything and the threads, whatever is under way. Idempotent. Never throws.
  void close() noexcept;

 private:
  /// `sent` and `received` count bytes over all rounds; guarded by mutex_, the rest is fixed.
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

  void send_loop();
  void recv_loop();
  void send_slice(const Job& job, std::uint64_t number, const Place& place, std::size_t length);
  std::size_t recv_slice(Job& job, std::uint64_t number, const Place& place);
  void recv_payload(const Exchange& exchange, const Exchange::Receipt& receipt, std::size_t offset, std::size_t length);
  std::size_t sendable(const Job& job, Place& place) const;
  static Place place_of(const std::vector<std::size_t>& begins, std::size_t position);
  Job& job(std::uint64_t number) { return jobs_[static_cast<std::size_t>(number - first_)]; }
  void begin(Job& job) const;
  void finish(std::unique_lock<std::mutex>& lock);
  void guard(void (TensorSync::*loop)(), const std::uint64_t& number) noexcept;
  void fail(Failure::Kind kind, const std::string& text) noexcept;
  std::string name_of(std::uint64_t number) const;
  std::string cause_of_wait() const;
  int next() const { return (options_.rank + 1) % options_.size; }
  int previous() const { return (options_.rank + options_.size - 1) % options_.size; }

  const Options options_;
  const bool sends_by_card_, receives_by_card_;
  const std::shared_ptr<RingConnection> connection_;
  const std::shared_ptr<NicArbiter> arbiter_;
  const std::shared_ptr<TensorAccount> account_ = std::make_shared<TensorAccount>();
  Failure failure_;
  std::vector<std::byte> received_;  // receiver: what is to be added, or to be spread over rows
  std::vector<std::byte> gathered_;  // sender: rows that are sent together

  mutable std::mutex mutex_;
  std::condition_variable may_send_, may_recv_, changed_;
  std::deque<Job> jobs_;         // oldest first; references stay valid while others are pushed
  std::uint64_t first_ = 0;      // number of jobs_.front(): all before it are complete
  std::uint64_t sending_ = 0;    // number of the job that is sent
  std::uint64_t receiving_ = 0;  // and of the one that is received
  bool stopped_ = false;

  std::thread sender_, receiver_;
};

}  // namespace fold3d::comm
