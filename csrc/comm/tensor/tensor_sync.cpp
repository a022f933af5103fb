#include "comm/tensor/tensor_sync.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>

#include "comm/arbiter/tensor_turn.h"
#include "comm/base/clock.h"
#include "comm/base/errors.h"

namespace fold3d::comm {
namespace {

using Direction = NicArbiter::Direction;

constexpr std::size_t kBlockBytes = 128u << 10;  // received and added while they lie in the cache; cuts no element
constexpr std::size_t kMostSliceBytes = 256u << 10, kLeastSliceBytes = 16u << 10;
constexpr std::size_t kSlicesOfRound = 8;         // so that a round begins soon after the one before it
constexpr std::size_t kTogetherBytes = 8u << 10;  // shorter rows are copied together rather than sent one by one

TensorSync::Options checked(TensorSync::Options options) {
  if (options.size < 2 || options.rank < 0 || options.rank >= options.size) {
    throw std::invalid_argument("TP.sync: there is no rank " + std::to_string(options.rank) + " in a group of " +
                                std::to_string(options.size) + "; a group has at least 2");
  }
  if (options.timeout.count() <= 0) throw std::invalid_argument("the timeout (setting comm_timeout) must be positive");
  core::check_hosts(options.hosts, options.size, "TP.sync");
  return options;
}

template <class Round, class Bytes>
std::vector<std::size_t> begins_of(const std::vector<Round>& rounds, Bytes bytes) {
  std::vector<std::size_t> begins{0};
  for (const Round& round : rounds) begins.push_back(begins.back() + bytes(round));
  return begins;
}

std::size_t slice_bytes(std::size_t round_bytes) {
  const std::size_t bytes = std::clamp(round_bytes / kSlicesOfRound, kLeastSliceBytes, kMostSliceBytes);
  return bytes / 64 * 64;  // no element is cut
}

}  // namespace

TensorSync::TensorSync(Options options, std::shared_ptr<RingConnection> connection, std::shared_ptr<NicArbiter> arbiter)
    : options_(checked(std::move(options))),
      sends_by_card_(core::uses_card(options_.hosts, options_.rank, next())),
      receives_by_card_(core::uses_card(options_.hosts, previous(), options_.rank)),
      connection_(std::move(connection)),
      arbiter_(std::move(arbiter)) {
  sender_ = std::thread([this] { guard(&TensorSync::send_loop, sending_); });
  receiver_ = std::thread([this] { guard(&TensorSync::recv_loop, receiving_); });
  pthread_setname_np(sender_.native_handle(), "tensor_send");
  pthread_setname_np(receiver_.native_handle(), "tensor_recv");
}

TensorSync::~TensorSync() { close(); }

TensorSync::Ticket TensorSync::issue(Exchange exchange, std::shared_ptr<void> keep) {
  failure_.check();
  const Exchange::Operation& operation = exchange.operation();
  if (operation.rank != options_.rank || operation.size != options_.size) {
    throw std::invalid_argument("the exchange is rank " + std::to_string(operation.rank) + "'s of " +
                                std::to_string(operation.size) + ", not that of " + options_.name);
  }
  std::vector<std::size_t> sends = begins_of(exchange.sends(), [](const Piece& piece) { return piece.bytes(); });
  std::vector<std::size_t> receives =
      begins_of(exchange.receives(), [](const Exchange::Receipt& receipt) { return receipt.target.bytes(); });
  Ticket ticket = 0;
  {
    const std::lock_guard lock(mutex_);
    ticket = first_ + jobs_.size();
    jobs_.push_back({.exchange = std::move(exchange),
                     .keep = std::move(keep),
                     .sends = std::move(sends),
                     .receives = std::move(receives),
                     .issued_ns = now_ns()});
  }
  may_send_.notify_one();
  may_recv_.notify_one();
  return ticket;
}

bool TensorSync::is_done(Ticket ticket) {
  failure_.check();
  const std::lock_guard lock(mutex_);
  return ticket < first_;
}

void TensorSync::wait(Ticket ticket) {
  using Clock = std::chrono::steady_clock;
  std::unique_lock lock(mutex_);
  if (ticket >= first_ + jobs_.size())
    throw std::invalid_argument("no exchange has the ticket " + std::to_string(ticket));
  if (ticket < first_) return;  // an error after it was complete is another one's
  const auto deadline = Clock::now() + options_.timeout;
  const auto look = [&] {
    return changed_.wait_until(lock, std::min(deadline, Clock::now() + kLook),
                               [&] { return failure_.is_set() || ticket < first_; });
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
  if (ticket < first_) return;
  if (!failure_.is_set()) {
    const std::string text = options_.name + ": the " + name_of(ticket) + " was not done after " +
                             seconds(options_.timeout) + " (setting comm_timeout): " + cause_of_wait();
    lock.unlock();
    fail(Failure::Kind::kTimeout, text);
  }
  failure_.check();
}

/// "TP.sync 17 (all-reduce of 4096 bytes)".
std::string TensorSync::name_of(std::uint64_t number) const {
  const Exchange& exchange = jobs_[static_cast<std::size_t>(number - first_)].exchange;
  return "TP.sync " + std::to_string(number) + " (" + exchange.name() + ")";
}

/// What the oldest exchange waits for. There is one.
std::string TensorSync::cause_of_wait() const {
  const Job& oldest = jobs_.front();
  if (oldest.received < oldest.to_receive()) {
    return name_of(first_) + " waits for tensor-parallel rank " + std::to_string(previous()) + ", which sent " +
           std::to_string(oldest.received) + " of " + std::to_string(oldest.to_receive()) + " bytes";
  }
  return name_of(first_) + " waits for tensor-parallel rank " + std::to_string(next()) +
         " to take what is left after " + std::to_string(oldest.sent) + " of " + std::to_string(oldest.to_send()) +
         " bytes";
}

void TensorSync::guard(void (TensorSync::*loop)(), const std::uint64_t& number) noexcept {
  const auto failed = [&](Failure::Kind kind, const std::string& cause) {
    std::string text;
    {
      const std::lock_guard lock(mutex_);
      if (stopped_) return;
      text = options_.name + ": " + name_of(number) + " failed: " + cause;
    }
    fail(kind, text);
  };
  try {
    (this->*loop)();
  } catch (const AbortedError&) {
    // whoever aborted knows why
  } catch (const ProtocolError& error) {
    failed(Failure::Kind::kProtocol, error.what());
  } catch (const std::exception& error) {
    failed(Failure::Kind::kError, error.what());
  }
}

void TensorSync::begin(Job& job) const {
  if (job.start_ns == 0) job.start_ns = account_->begin();
}

TensorSync::Place TensorSync::place_of(const std::vector<std::size_t>& begins, std::size_t position) {
  const auto end = std::upper_bound(begins.begin(), begins.end(), position);  // empty rounds end where they begin
  const auto round = static_cast<std::size_t>(end - begins.begin()) - 1;
  return {round, position - begins[round], *end - position};
}

/// How long the next slice is, if it may be sent already; else 0. `place` is where it lies.
std::size_t TensorSync::sendable(const Job& job, Place& place) const {
  place = place_of(job.sends, job.sent);
  std::size_t length = std::min(slice_bytes(job.sends[place.round + 1] - job.sends[place.round]), place.left);
  const std::size_t together = job.exchange.sends()[place.round].at(place.offset, length).size();
  if (together >= kTogetherBytes) length = together;
  // A whole slice, or what is left of the round: small pieces would cost more than they gain.
  if (place.round > 0 && job.received < job.receives[place.round - 1] + place.offset + length) return 0;
  return length;
}

void TensorSync::send_loop() {
  TensorTurn turn(*arbiter_, Direction::kSend, sends_by_card_);
  std::unique_lock lock(mutex_);
  for (;;) {
    std::size_t length = 0;
    Place place;
    const auto ready = [&] {
      if (stopped_) return true;
      while (sending_ < first_ + jobs_.size() && job(sending_).sent == job(sending_).to_send()) ++sending_;
      if (sending_ == first_ + jobs_.size()) return false;
      length = sendable(job(sending_), place);
      return length > 0;
    };
    if (!ready()) {
      turn.leave();
      may_send_.wait(lock, ready);
    }
    if (stopped_) return;
    Job& current = job(sending_);
    begin(current);
    const std::uint64_t number = sending_;
    lock.unlock();
    turn.take(length);
    send_slice(current, number, place, length);
    lock.lock();
    current.sent += length;
    finish(lock);
  }
}

void TensorSync::send_slice(const Job& job, std::uint64_t number, const Place& place, std::size_t length) {
  const Piece& piece = job.exchange.sends()[place.round];
  std::span<const std::byte> payload = piece.at(place.offset, length);
  if (payload.size() < length) {
    gathered_.resize(std::max(gathered_.size(), length));
    const std::span<std::byte> rows = std::span(gathered_).first(length);
    piece.take(place.offset, rows);
    payload = rows;
  }
  const ExchangeHeader header = header_of(job.exchange, number, place.round, place.offset, length);
  connection_->send(std::as_bytes(std::span(&header, 1)), payload);
}

void TensorSync::recv_loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    may_recv_.wait(lock, [&] { return stopped_ || receiving_ < first_ + jobs_.size(); });
    if (stopped_) return;
    Job& current = job(receiving_);
    const std::uint64_t number = receiving_;
    const std::size_t position = current.received;
    if (!current.is_prepared) {
      lock.unlock();
      current.exchange.prepare();
      lock.lock();
      current.is_prepared = true;
    }
    if (position < current.to_receive()) {
      lock.unlock();
      const std::size_t length = recv_slice(current, number, place_of(current.receives, position));
      lock.lock();
      current.received += length;
      may_send_.notify_one();
    }
    if (current.received == current.to_receive()) {
      lock.unlock();
      current.exchange.finish();
      lock.lock();
      current.is_finished = true;
      ++receiving_;
      finish(lock);
    }
  }
}

std::size_t TensorSync::recv_slice(Job& job, std::uint64_t number, const Place& place) {
  ExchangeHeader header;
  connection_->recv(std::as_writable_bytes(std::span(&header, 1)));
  {
    const std::lock_guard lock(mutex_);
    begin(job);
  }
  check_header(header, header_of(job.exchange, number, place.round, place.offset, 0), place.left);
  TensorTurn turn(*arbiter_, Direction::kReceive, receives_by_card_);
  turn.take(header.bytes);
  recv_payload(job.exchange, job.exchange.receives()[place.round], place.offset, header.bytes);
  return header.bytes;
}

void TensorSync::recv_payload(const Exchange& exchange, const Exchange::Receipt& receipt, std::size_t offset,
                              std::size_t length) {
  const std::size_t end = offset + length;
  while (offset < end) {
    const std::size_t longest = connection_->can_split() ? std::min(kBlockBytes, end - offset) : end - offset;
    std::span<std::byte> target = receipt.target.at(offset, longest);
    const bool is_stored = receipt.own.data == nullptr;
    if (is_stored && (target.size() == longest || (connection_->can_split() && target.size() >= kTogetherBytes))) {
      connection_->recv(target);
      offset += target.size();
      continue;
    }
    received_.resize(std::max(received_.size(), longest));
    std::span<std::byte> block = std::span(received_).first(longest);
    connection_->recv(block);
    if (is_stored) receipt.target.put(offset, block);
    for (std::size_t done = 0; !is_stored && done < longest;) {
      const std::span<std::byte> own = receipt.own.at(offset + done, longest - done);
      target = receipt.target.at(offset + done, own.size());
      const std::array<const std::byte*, 2> parts = {own.data(), block.data() + done};
      combine(exchange.operation().number, exchange.operation().reduction, target, parts);
      done += target.size();
    }
    offset += longest;
  }
}

/// Completes the oldest exchanges that are through. Both threads come here after every slice.
void TensorSync::finish(std::unique_lock<std::mutex>& lock) {
  while (!jobs_.empty() && !stopped_) {
    Job& oldest = jobs_.front();
    if (oldest.sent < oldest.to_send() || !oldest.is_finished) return;
    account_->end({.kind = oldest.exchange.kind(),
                   .issued_ns = oldest.issued_ns,
                   .start_ns = oldest.start_ns,
                   .bytes = oldest.to_send()});
    std::shared_ptr<void> keep = std::move(oldest.keep);
    sending_ = std::max(sending_, first_ + 1);
    jobs_.pop_front();
    ++first_;
    changed_.notify_all();
    lock.unlock();
    keep.reset();  // without the lock: it may be much to free
    lock.lock();
  }
}

void TensorSync::fail(Failure::Kind kind, const std::string& text) noexcept {
  if (!failure_.set(kind, text)) return;
  {
    const std::lock_guard lock(mutex_);  // whoever looked at the failure before is waiting now
    stopped_ = true;
  }
  may_send_.notify_all();
  may_recv_.notify_all();
  changed_.notify_all();
  connection_->abort(text);
}

void TensorSync::abort(const std::string& reason) noexcept { fail(Failure::Kind::kAborted, reason); }

void TensorSync::close() noexcept {
  fail(Failure::Kind::kAborted, options_.name + " closed its TP.sync");
  for (std::thread* thread : {&sender_, &receiver_}) {
    if (thread->joinable()) thread->join();
  }
}

}  // namespace fold3d::comm
