#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "comm/arbiter/nic_arbiter.h"
#include "comm/base/failure.h"
#include "comm/ring/exchange.h"
#include "comm/ring/ring.h"
#include "comm/ring/ring_connection.h"
#include "comm/tensor/tensor_account.h"
#include "core/network/hosts.h"

namespace fold3d::comm {

/// TP.sync of one rank: exchanges of tensors in host memory among the ranks that share the weights of the same layers,
/// over a ring of connections, one after the other in the order in which they are issued, which is the same on all of
/// them. What is computed next waits for them, so they outrank PP.sync and DP.sync on the host's network card; what
/// stays within a host is neither announced there nor held.
///
/// The ring's two threads are its own. All calls from any thread.
/// Errors: the first one is kept and ends everything; every pending and later call throws it again (CommError or a
/// subclass). There is no way back from the failed state.
class TensorSync final : private Ring::Listener {
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
  ~TensorSync() override;
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
  void begun() override;
  void completed(const Ring::Record& record, const std::shared_ptr<void>& keep) override;
  void failed(Failure::Kind kind, const std::string& text) override;
  void fail(Failure::Kind kind, const std::string& text) noexcept;

  const Options options_;
  const std::shared_ptr<TensorAccount> account_ = std::make_shared<TensorAccount>();
  Failure failure_;

  std::mutex mutex_;
  std::condition_variable changed_;
  Ticket issued_ = 0, done_ = 0;  // how many

  Ring ring_;  // last: its threads call begun(), completed() and failed()
};

}  // namespace fold3d::comm
