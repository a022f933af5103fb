#include "comm/tensor/tensor_sync.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "comm/base/clock.h"
#include "comm/base/errors.h"

namespace fold3d::comm {
namespace {

TensorSync::Options checked(TensorSync::Options options) {
  if (options.timeout.count() <= 0) throw std::invalid_argument("the timeout (setting comm_timeout) must be positive");
  return options;
}

}  // namespace

TensorSync::TensorSync(Options options, std::shared_ptr<RingConnection> connection, std::shared_ptr<NicArbiter> arbiter)
    : options_(checked(std::move(options))),
      ring_({.rank = options_.rank,
             .size = options_.size,
             .traffic = NicArbiter::Traffic::kTensor,
             .hosts = options_.hosts},
            std::move(connection), std::move(arbiter)) {
  ring_.start(*this);
}

TensorSync::~TensorSync() { close(); }

TensorSync::Ticket TensorSync::issue(Exchange exchange, std::shared_ptr<void> keep) {
  failure_.check();
  const Exchange::Operation& operation = exchange.operation();
  if (operation.rank != options_.rank || operation.size != options_.size) {
    throw std::invalid_argument("the exchange is rank " + std::to_string(operation.rank) + "'s of " +
                                std::to_string(operation.size) + ", not that of " + options_.name);
  }
  const std::lock_guard lock(mutex_);  // the ring's own comes after it
  ++issued_;
  return ring_.push(std::move(exchange), std::move(keep));
}

bool TensorSync::is_done(Ticket ticket) {
  failure_.check();
  const std::lock_guard lock(mutex_);
  return ticket < done_;
}

void TensorSync::wait(Ticket ticket) {
  using Clock = std::chrono::steady_clock;
  std::unique_lock lock(mutex_);
  if (ticket >= issued_) throw std::invalid_argument("no exchange has the ticket " + std::to_string(ticket));
  if (ticket < done_) return;  // an error after it was complete is another one's
  const auto deadline = Clock::now() + options_.timeout;
  const auto look = [&] {
    return changed_.wait_until(lock, std::min(deadline, Clock::now() + kLook),
                               [&] { return failure_.is_set() || ticket < done_; });
  };
  {
    const TensorAccount::Waiting waiting(*account_);
    bool ended = look();
    while (!ended && Clock::now() < deadline) {
      lock.unlock();
      if (options_.while_waiting) options_.while_waiting();
      lock.lock();
      ended = look();
    }
  }
  if (ticket < done_) return;
  lock.unlock();
  if (!failure_.is_set()) {
    const std::string name = ring_.name_of(ticket);
    if (name.empty()) return;  // it was complete just now
    fail(Failure::Kind::kTimeout, options_.name + ": the " + name + " was not done after " + seconds(options_.timeout) +
                                      " (setting comm_timeout): " + ring_.waits_for());
  }
  failure_.check();
}

void TensorSync::begun() { account_->begin(); }

void TensorSync::completed(const Ring::Record& record, const std::shared_ptr<void>&) {
  account_->end(
      {.kind = record.kind, .issued_ns = record.issued_ns, .start_ns = record.start_ns, .bytes = record.bytes});
  {
    const std::lock_guard lock(mutex_);
    ++done_;
  }
  changed_.notify_all();
}

void TensorSync::failed(Failure::Kind kind, const std::string& text) { fail(kind, options_.name + ": " + text); }

void TensorSync::fail(Failure::Kind kind, const std::string& text) noexcept {
  if (!failure_.set(kind, text)) return;
  ring_.abort(text);
  {
    const std::lock_guard lock(mutex_);
  }  // whoever looked at the failure before is waiting now
  changed_.notify_all();
}

void TensorSync::abort(const std::string& reason) noexcept { fail(Failure::Kind::kAborted, reason); }

void TensorSync::close() noexcept {
  fail(Failure::Kind::kAborted, options_.name + " closed its TP.sync");
  ring_.stop();
}

}  // namespace fold3d::comm
