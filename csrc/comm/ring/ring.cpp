#include "comm/ring/ring.h"

#include <pthread.h>

#include <algorithm>
#include <span>
#include <stdexcept>
#include <utility>

#include "comm/base/clock.h"
#include "comm/base/errors.h"
#include "comm/ring/slice_header.h"

namespace fold3d::comm {
namespace {

using Direction = NicArbiter::Direction;

constexpr std::size_t kBlockBytes = 128u << 10;  // received and added while they lie in the cache; cuts no element
constexpr std::size_t kMostSliceBytes = 256u << 10, kLeastSliceBytes = 16u << 10;  // without credits
constexpr std::size_t kSlicesOfRound = 8;          // so that a round begins soon after the one before it
constexpr std::size_t kTogetherBytes = 8u << 10;   // shorter rows are copied together rather than sent one by one
constexpr std::int64_t kWorthClosingNs = 500'000;  // half a slice

std::string member_of(NicArbiter::Traffic traffic, int rank) {
  const bool is_tensor = traffic == NicArbiter::Traffic::kTensor;
  return (is_tensor ? "tensor-parallel rank " : "replica ") + std::to_string(rank);
}

Ring::Options checked(Ring::Options options) {
  if (options.size < 2 || options.rank < 0 || options.rank >= options.size) {
    throw std::invalid_argument("ring: there is no " + member_of(options.traffic, options.rank) + " among " +
                                std::to_string(options.size) + "; a ring has at least 2");
  }
  core::check_hosts(options.hosts, options.size, "ring");
  return options;
}

template <class Round, class Bytes>
std::vector<std::size_t> begins_of(const std::vector<Round>& rounds, Bytes bytes) {
  std::vector<std::size_t> begins{0};
  for (const Round& round : rounds) begins.push_back(begins.back() + bytes(round));
  return begins;
}

std::size_t slice_of_round(std::size_t round_bytes) {
  const std::size_t bytes = std::clamp(round_bytes / kSlicesOfRound, kLeastSliceBytes, kMostSliceBytes);
  return bytes / 64 * 64;  // no element is cut
}

/// The first `length` bytes of a buffer that grows as it must.
std::span<std::byte> room_in(std::vector<std::byte>& buffer, std::size_t length) {
  buffer.resize(std::max(buffer.size(), length));
  return std::span(buffer).first(length);
}

}  // namespace

Ring::Ring(Options options, std::shared_ptr<RingConnection> connection, std::shared_ptr<NicArbiter> arbiter)
    : options_(checked(std::move(options))),
      sends_by_card_(core::uses_card(options_.hosts, options_.rank, next())),
      receives_by_card_(core::uses_card(options_.hosts, previous(), options_.rank)),
      connection_(std::move(connection)),
      arbiter_(std::move(arbiter)) {
  if (!options_.credits) return;
  options_.credits->add(connection_);
  flow_.emplace(options_.credits, connection_, arbiter_, sends_by_card_);
}

Ring::~Ring() { stop(); }

void Ring::start(Listener& listener) {
  listener_ = &listener;
  sender_ = std::thread([this] { guard(&Ring::send_loop, sending_); });
  receiver_ = std::thread([this] { guard(&Ring::recv_loop, receiving_); });
  const std::string name = to_string(options_.traffic);
  pthread_setname_np(sender_.native_handle(), (name + "_send").c_str());
  pthread_setname_np(receiver_.native_handle(), (name + "_recv").c_str());
}

std::uint64_t Ring::push(Exchange exchange, std::shared_ptr<void> keep) {
  std::vector<std::size_t> sends = begins_of(exchange.sends(), [](const Piece& piece) { return piece.bytes(); });
  std::vector<std::size_t> receives =
      begins_of(exchange.receives(), [](const Exchange::Receipt& receipt) { return receipt.target.bytes(); });
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    number = first_ + jobs_.size();
    jobs_.push_back({.exchange = std::move(exchange),
                     .keep = std::move(keep),
                     .sends = std::move(sends),
                     .receives = std::move(receives),
                     .issued_ns = now_ns()});
  }
  may_send_.notify_one();
  may_recv_.notify_one();
  return number;
}

void Ring::abort(const std::string& reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  may_send_.notify_all();
  may_recv_.notify_all();
  connection_->abort(reason);
}

void Ring::stop() noexcept {
  abort("the ring was closed");
  for (std::thread* thread : {&sender_, &receiver_}) {
    if (thread->joinable()) thread->join();
  }
}

std::string Ring::member(int rank) const { return member_of(options_.traffic, rank); }

std::string Ring::name_of(std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  return number < first_ ? "" : jobs_[static_cast<std::size_t>(number - first_)].exchange.name(number);
}

std::string Ring::waits_for() const {
  const std::lock_guard lock(mutex_);
  if (jobs_.empty()) return {};
  const Job& oldest = jobs_.front();
  const auto wire_text = [&](std::size_t bytes) { return std::to_string(oldest.exchange.wire_bytes(bytes)); };
  const std::string name = oldest.exchange.name(first_);
  if (oldest.received < oldest.to_receive()) {
    return name + " waits for " + member(previous()) + ", which sent " + wire_text(oldest.received) + " of " +
           wire_text(oldest.to_receive()) + " bytes";
  }
  return name + " waits for " + member(next()) + " to take what is left after " + wire_text(oldest.sent) + " of " +
         wire_text(oldest.to_send()) + " bytes";
}

/// `number`: the job under way, sending_ or receiving_.
void Ring::guard(void (Ring::*loop)(), const std::uint64_t& number) noexcept {
  const auto failed = [&](Failure::Kind kind, const std::string& cause) {
    std::string name;
    {
      const std::lock_guard lock(mutex_);
      if (stopped_) return;
      name = job(number).exchange.name(number);
    }
    listener_->failed(kind, name + " failed: " + cause);
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

/// Before its first slice is sent, or once that of the previous member is here. Without the lock.
void Ring::begin(Job& job) {
  {
    const std::lock_guard lock(mutex_);
    if (job.start_ns != 0) return;
    job.start_ns = now_ns();
  }
  listener_->begun();
}

Ring::Place Ring::place_of(const std::vector<std::size_t>& begins, std::size_t position) {
  const auto end = std::upper_bound(begins.begin(), begins.end(), position);  // empty rounds end where they begin
  const auto round = static_cast<std::size_t>(end - begins.begin()) - 1;
  return {round, position - begins[round], *end - position};
}

/// How long the next slice is, if it may be sent already; else 0. `place` is where it lies.
std::size_t Ring::sendable(const Job& job, Place& place) const {
  place = place_of(job.sends, job.sent);
  const std::size_t round_bytes = job.sends[place.round + 1] - job.sends[place.round];
  // Credits count what travels.
  const std::size_t slice =
      flow_ ? flow_->slice_bytes() * (job.exchange.operation().as_bfloat16 ? 2 : 1) : slice_of_round(round_bytes);
  std::size_t length = std::min(slice, place.left);
  const std::size_t together = job.exchange.sends()[place.round].at(place.offset, length).size();
  if (together >= kTogetherBytes) length = together;
  // A whole slice, or what is left of the round: small pieces would cost more than they gain.
  if (place.round > 0 && job.received < job.receives[place.round - 1] + place.offset + length) return 0;
  return length;
}

void Ring::send_loop() {
  Turn turn(*arbiter_, options_.traffic, Direction::kSend, sends_by_card_);
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
      lock.unlock();
      turn.leave();  // before the listener hears of the end, who may push what yields to it
      lock.lock();
    }
    finish(lock);
    may_send_.wait(lock, ready);
    if (stopped_) return;
    Job& current = job(sending_);
    const std::uint64_t number = sending_;
    lock.unlock();
    send_slice(current, number, place, length, turn);
    lock.lock();
    current.sent += length;
  }
}

void Ring::send_slice(Job& job, std::uint64_t number, const Place& place, std::size_t length, Turn& turn) {
  begin(job);
  const Piece& piece = job.exchange.sends()[place.round];
  std::span<const std::byte> payload = piece.at(place.offset, length);
  if (job.exchange.operation().as_bfloat16) {
    const std::span<std::byte> rounded = room_in(outgoing_, job.exchange.wire_bytes(length));
    narrow(payload, rounded);
    payload = rounded;
  } else if (payload.size() < length) {
    const std::span<std::byte> rows = room_in(outgoing_, length);
    piece.take(place.offset, rows);
    payload = rows;
  }
  SliceHeader header = slice_header(job.exchange, number, place.round, place.offset, length);
  if (flow_) header.window = flow_->window();
  turn.take(payload.size());
  const bool is_held = sends_by_card_ && options_.traffic != Traffic::kTensor;
  if (is_held) arbiter_->hold(Direction::kSend, options_.traffic);
  const std::int64_t start_ns = now_ns();
  if (flow_) flow_->begins();
  connection_->send(std::as_bytes(std::span(&header, 1)), payload);
  if (is_held) arbiter_->passed(Direction::kSend, start_ns, now_ns());
  if (flow_) flow_->ends(sizeof(header) + payload.size());
}

void Ring::recv_loop() {
  Turn turn(*arbiter_, options_.traffic, Direction::kReceive, receives_by_card_);
  std::unique_lock lock(mutex_);
  for (;;) {
    may_recv_.wait(lock, [&] { return stopped_ || receiving_ < first_ + jobs_.size(); });
    if (stopped_) return;
    Job& current = job(receiving_);
    const std::uint64_t number = receiving_;
    const std::size_t position = current.received;
    const bool is_prepared = std::exchange(current.is_prepared, true);
    lock.unlock();
    if (!is_prepared) current.exchange.prepare();
    std::size_t length = 0;
    if (position < current.to_receive()) {
      length = recv_slice(current, number, place_of(current.receives, position), turn);
    }
    const bool is_through = position + length == current.to_receive();
    if (is_through) current.exchange.finish();
    lock.lock();
    current.received += length;
    may_send_.notify_one();
    if (!is_through) continue;
    current.is_finished = true;
    ++receiving_;
    finish(lock);
  }
}

std::size_t Ring::recv_slice(Job& job, std::uint64_t number, const Place& place, Turn& turn) {
  SliceHeader header;
  connection_->recv(std::as_writable_bytes(std::span(&header, 1)));
  begin(job);
  check_slice(header, slice_header(job.exchange, number, place.round, place.offset, 0), place.left);
  if (header.window != granted_) connection_->limit_window(static_cast<std::size_t>(granted_ = header.window));
  const auto length = static_cast<std::size_t>(header.bytes);
  turn.take(job.exchange.wire_bytes(length));
  const bool is_held = receives_by_card_ && options_.traffic != Traffic::kTensor;
  if (is_held) {
    // So the peer leaves the card to others, too, where that is worth some calls of the system.
    const bool closes = arbiter_->longest_ns(Direction::kReceive, options_.traffic) >= kWorthClosingNs;
    if (closes) connection_->close_window();
    arbiter_->hold(Direction::kReceive, options_.traffic);
    if (closes) connection_->open_window();
  }
  const std::int64_t start_ns = now_ns();
  recv_payload(job.exchange, job.exchange.receives()[place.round], place.offset, length);
  if (is_held) arbiter_->passed(Direction::kReceive, start_ns, now_ns());
  turn.leave();
  return length;
}

void Ring::recv_payload(const Exchange& exchange, const Exchange::Receipt& receipt, std::size_t offset,
                        std::size_t length) {
  const bool is_direct = receipt.own.data == nullptr && !exchange.operation().as_bfloat16;
  for (const std::size_t end = offset + length; offset < end;) {
    const std::size_t left = end - offset;
    std::span<std::byte> target = receipt.target.at(offset, left);
    if (is_direct && (target.size() == left || (connection_->can_split() && target.size() >= kTogetherBytes))) {
      connection_->recv(target);
      offset += target.size();
      continue;
    }
    const std::size_t block_bytes = connection_->can_split() ? std::min(kBlockBytes, left) : left;
    const std::span<std::byte> block = room_in(incoming_, exchange.wire_bytes(block_bytes));
    connection_->recv(block);
    for (std::size_t done = 0; done < block_bytes; done += target.size()) {
      std::span<std::byte> own;
      target = receipt.target.at(offset + done, block_bytes - done);
      if (receipt.own.data != nullptr) {
        own = receipt.own.at(offset + done, target.size());
        target = target.first(own.size());
      }
      const std::size_t begin = exchange.wire_bytes(done);
      exchange.receive(receipt, target, own, block.subspan(begin, exchange.wire_bytes(target.size())));
    }
    offset += block_bytes;
  }
}

/// Completes the oldest exchanges that are through, in their order: the thread that finds the other one at it leaves
/// the rest to it.
void Ring::finish(std::unique_lock<std::mutex>& lock) {
  if (completing_) return;
  completing_ = true;
  while (!jobs_.empty() && !stopped_) {
    Job& oldest = jobs_.front();
    if (oldest.sent < oldest.to_send() || !oldest.is_finished) break;
    const Record record{.kind = oldest.exchange.kind(),
                        .bucket = oldest.exchange.operation().bucket,
                        .issued_ns = oldest.issued_ns,
                        .start_ns = oldest.start_ns,
                        .end_ns = now_ns(),
                        .bytes = oldest.exchange.wire_bytes(oldest.to_send())};
    std::shared_ptr<void> keep = std::move(oldest.keep);
    sending_ = std::max(sending_, first_ + 1);
    jobs_.pop_front();
    ++first_;
    lock.unlock();
    listener_->completed(record, keep);
    keep.reset();  // without the lock: freeing a tensor may have to wait for the interpreter
    lock.lock();
  }
  completing_ = false;
}

}  // namespace fold3d::comm
