#include "comm/ring/ring.h"

#include <pthread.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "comm/arbiter/reduce_turn.h"
#include "comm/base/clock.h"
#include "comm/base/errors.h"
#include "comm/ring/ring_slice.h"

namespace fold3d::comm {
namespace {

using Direction = NicArbiter::Direction;
using Traffic = NicArbiter::Traffic;

constexpr std::size_t kAddBytes = 128u << 10;  // received and added while they lie in the cache; cuts no element

Ring::Options checked(Ring::Options options) {
  if (options.size < 2 || options.rank < 0 || options.rank >= options.size) {
    throw std::invalid_argument("ring: there is no replica " + std::to_string(options.rank) + " among " +
                                std::to_string(options.size) + "; a ring has at least 2");
  }
  core::check_hosts(options.hosts, options.size, "ring");
  return options;
}

}  // namespace

Ring::Ring(const Options& options, std::shared_ptr<RingConnection> connection, std::shared_ptr<NicArbiter> arbiter,
           std::shared_ptr<Credits> credits)
    : options_(checked(options)),
      sends_by_card_(core::uses_card(options_.hosts, options_.rank, next())),
      receives_by_card_(core::uses_card(options_.hosts, previous(), options_.rank)),
      connection_(std::move(connection)),
      arbiter_(std::move(arbiter)),
      credits_(std::move(credits)) {}

Ring::~Ring() { stop(); }

void Ring::start(Listener& listener) {
  listener_ = &listener;
  sender_ = std::thread([this] { guard(&Ring::send_loop, sending_); });
  receiver_ = std::thread([this] { guard(&Ring::recv_loop, receiving_); });
  const std::string name = to_string(options_.traffic);
  pthread_setname_np(sender_.native_handle(), (name + "_send").c_str());
  pthread_setname_np(receiver_.native_handle(), (name + "_recv").c_str());
}

void Ring::push(Collective collective) {
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return;
    const auto size = static_cast<std::size_t>(options_.size);
    const std::size_t shard_bytes =
        collective.buffer->bytes() / size / collective.element_bytes * collective.wire_bytes();
    jobs_.push_back({.collective = std::move(collective),
                     .shard_bytes = shard_bytes,
                     .total_bytes = (size - 1) * shard_bytes,
                     .sent = 0,
                     .received = 0,
                     .start_ns = 0});
  }
  may_send_.notify_one();
  may_recv_.notify_one();
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
  abort("the stream was closed");
  for (std::thread* thread : {&sender_, &receiver_}) {
    if (thread->joinable()) thread->join();
  }
}

std::string Ring::waits_for() const {
  const std::lock_guard lock(mutex_);
  if (jobs_.empty()) return {};
  const Job& oldest = jobs_.front();
  const std::string of_total = " of " + std::to_string(oldest.total_bytes) + " bytes";
  const std::string name = name_of(options_.traffic, oldest.collective);
  if (oldest.received < oldest.total_bytes) {
    return "the " + name + " waits for replica " + std::to_string(previous()) + ", which sent " +
           std::to_string(oldest.received) + of_total;
  }
  return "the " + name + " waits for replica " + std::to_string(next()) + " to take what is left after " +
         std::to_string(oldest.sent) + of_total;
}

void Ring::guard(void (Ring::*loop)(), const std::uint64_t& number) noexcept {
  try {
    (this->*loop)();
  } catch (const AbortedError&) {
    // whoever aborted knows why
  } catch (const ProtocolError& error) {
    fail(Failure::Kind::kProtocol, number, error.what());
  } catch (const std::exception& error) {
    fail(Failure::Kind::kError, number, error.what());
  }
}

/// `number`: the job under way, sending_ or receiving_.
void Ring::fail(Failure::Kind kind, const std::uint64_t& number, const std::string& cause) noexcept {
  std::string name;
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return;
    name = name_of(options_.traffic, job(number).collective);
  }
  listener_->failed(kind, name + " failed: " + cause);
}

void Ring::begin(Job& job) {
  if (job.start_ns == 0) job.start_ns = now_ns();
}

/// How many bytes beyond `sent` may go: those of the first round always, the others once they were received.
std::size_t Ring::sendable(const Job& job) const {
  return std::min(job.shard_bytes + job.received, job.total_bytes) - job.sent;
}

void Ring::send_loop() {
  ReduceTurn turn(*arbiter_, options_.traffic, sends_by_card_);
  std::unique_lock lock(mutex_);
  for (;;) {
    std::size_t length = 0;
    const auto ready = [&] {
      if (stopped_) return true;
      if (sending_ == first_ + jobs_.size()) return false;
      const Job& next_job = job(sending_);
      // A whole slice, or what is left of the shard: small pieces would cost more than they gain.
      const std::size_t left_of_shard = next_job.shard_bytes - next_job.sent % next_job.shard_bytes;
      length = std::min(credits_->slice_bytes(), left_of_shard);
      return sendable(next_job) >= length;
    };
    const auto leave_if_idle = [&] {
      if (ready()) return;
      lock.unlock();
      turn.leave();
      lock.lock();
    };
    leave_if_idle();
    may_send_.wait(lock, ready);
    if (stopped_) return;
    Job& current = job(sending_);
    begin(current);
    const std::size_t position = current.sent;
    lock.unlock();
    turn.take(length);
    send_slice(current, position, length);
    lock.lock();
    current.sent += length;
    if (current.sent == current.total_bytes) ++sending_;
    leave_if_idle();  // before the listener hears of the end, who may push a gather
    finish(lock);
  }
}

void Ring::recv_loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    may_recv_.wait(lock, [&] { return stopped_ || receiving_ < first_ + jobs_.size(); });
    if (stopped_) return;
    Job& current = job(receiving_);
    const std::size_t position = current.received;
    lock.unlock();
    const std::size_t length = recv_slice(current, position);
    lock.lock();
    current.received += length;
    if (current.received == current.total_bytes) ++receiving_;
    may_send_.notify_one();
    finish(lock);
  }
}

/// Hands the oldest collective to the listener if it is complete. Both threads come here after every slice, so there is
/// never a second one.
void Ring::finish(std::unique_lock<std::mutex>& lock) {
  if (jobs_.empty() || stopped_) return;
  Job& oldest = jobs_.front();
  if (oldest.sent < oldest.total_bytes || oldest.received < oldest.total_bytes) return;
  const CollectiveRecord record{.traffic = options_.traffic,
                                .bucket = oldest.collective.bucket,
                                .start_ns = oldest.start_ns,
                                .end_ns = now_ns(),
                                .bytes = oldest.total_bytes};
  std::shared_ptr<Buffer> buffer = std::move(oldest.collective.buffer);
  jobs_.pop_front();
  ++first_;
  lock.unlock();
  listener_->completed(record);
  buffer.reset();  // without the lock: freeing a tensor may have to wait for the interpreter
  lock.lock();
}

/// The memory of the slice at `position`, when the shards of the rounds are first_shard, first_shard - 1, ...
Ring::Place Ring::place(const Job& job, std::size_t position, std::size_t length, int first_shard) const {
  const int round = static_cast<int>(position / job.shard_bytes);
  const int shard = (first_shard - round + 2 * options_.size) % options_.size;
  const std::size_t offset = position % job.shard_bytes;
  std::byte* const data = job.collective.buffer->host_data();
  const std::size_t ratio = job.collective.element_bytes / job.collective.wire_bytes();
  const std::size_t begin = static_cast<std::size_t>(shard) * job.shard_bytes + offset;
  return {round, offset, {data + ratio * begin, ratio * length}};
}

void Ring::send_slice(const Job& job, std::size_t position, std::size_t length) {
  const bool is_reduce = options_.traffic == Traffic::kReduce;
  const Place slice = place(job, position, length, is_reduce ? options_.rank - 1 : options_.rank);
  SliceHeader header =
      slice_header(options_.traffic, job.collective, job.shard_bytes, slice.round, slice.offset, length);
  header.window = window_;
  std::span<const std::byte> payload = slice.bytes;
  if (job.collective.as_bfloat16) {
    rounded_.resize(std::max(rounded_.size(), length));
    narrow(slice.bytes, std::span(rounded_).first(length));
    payload = std::span(rounded_).first(length);
  }
  if (sends_by_card_) arbiter_->hold(Direction::kSend, options_.traffic);
  const std::int64_t start_ns = now_ns();
  meter_.begins(start_ns, connection_->queue());
  connection_->send(std::as_bytes(std::span(&header, 1)), payload);
  const std::int64_t end_ns = now_ns();
  if (sends_by_card_) arbiter_->passed(Direction::kSend, start_ns, end_ns);
  measured(meter_.ends(end_ns, sizeof(header) + length, connection_->queue()));
}

/// The measured speed decides about later slices.
void Ring::measured(bool window_ended) {
  const double bandwidth = meter_.bandwidth();
  if (bandwidth == 0.0) return;
  credits_->set_bandwidth(bandwidth);
  if (sends_by_card_) arbiter_->set_bandwidth(bandwidth);  // else it is not the card's
  if (window_ended) {
    const NicArbiter::Counters counters = arbiter_->counters();
    const std::int64_t urgent = counters.messages + counters.preemptions;
    flight_.measured(meter_.last(), urgent == urgent_);
    urgent_ = urgent;
    window_ = flight_.bytes(bandwidth, connection_->round_trip_seconds());
    connection_->limit_waiting(credits_->waiting_bytes());
  }
}

std::size_t Ring::recv_slice(Job& job, std::size_t position) {
  const bool is_reduce = options_.traffic == Traffic::kReduce;
  SliceHeader header;
  connection_->recv(std::as_writable_bytes(std::span(&header, 1)));
  {
    const std::lock_guard lock(mutex_);
    begin(job);
  }
  const int first_shard = (is_reduce ? options_.rank - 2 : options_.rank - 1);
  const Place expected = place(job, position, 0, first_shard);
  check_slice(header, slice_header(options_.traffic, job.collective, job.shard_bytes, expected.round, expected.offset,
                                   header.bytes));
  if (header.window != granted_) connection_->limit_window(static_cast<std::size_t>(granted_ = header.window));
  const auto length = static_cast<std::size_t>(header.bytes);
  // A payload that is not read closes the connection's window: so the peer leaves the card to others, too.
  if (receives_by_card_) arbiter_->hold(Direction::kReceive, options_.traffic);
  const std::int64_t start_ns = now_ns();
  const std::span<std::byte> target = place(job, position, length, first_shard).bytes;
  if (is_reduce || job.collective.as_bfloat16) {
    recv_payload(job, target, length, expected.round);
  } else {
    connection_->recv(target);
  }
  if (receives_by_card_) arbiter_->passed(Direction::kReceive, start_ns, now_ns());
  return length;
}

/// Receives `length` bytes and adds them to `target`, or writes them there; of 16 bits for each 32 of the target's
/// where that is what travels.
void Ring::recv_payload(const Job& job, std::span<std::byte> target, std::size_t length, int round) {
  const Collective& collective = job.collective;
  const bool is_last = round == options_.size - 2;  // this replica owns the shard
  const std::size_t ratio = target.size() / length;
  const std::size_t block = connection_->can_split() ? std::min(kAddBytes, length) : length;
  received_.resize(std::max(received_.size(), block));
  for (std::size_t done = 0; done < length; done += block) {
    const std::span<std::byte> part = std::span(received_).first(std::min(block, length - done));
    const std::span<std::byte> into = target.subspan(ratio * done, ratio * part.size());
    connection_->recv(part);
    if (options_.traffic == Traffic::kGather) {
      widen(part, into);
    } else if (!collective.as_bfloat16) {
      add_scaled(into, part, collective.element, is_last ? collective.scale : 1.0);
    } else if (is_last) {
      add_last_bfloat16(into, part, collective.scale);
    } else {
      add_bfloat16(into, part);
    }
  }
}

}  // namespace fold3d::comm
