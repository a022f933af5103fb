#include "runtime/collectives/collectives_c10d.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <pthread.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <chrono>
#include <limits>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "comm/arbiter/poll_period.h"
#include "comm/arbiter/turn.h"
#include "comm/base/clock.h"
#include "comm/base/errors.h"
#include "core/network/slice_rule.h"
#include "runtime/collectives/row_collectives.h"

namespace fold3d::runtime {

namespace {

using comm::NicArbiter;
using Traffic = NicArbiter::Traffic;

constexpr int kNamed = 4;  // replicas

bool spans_hosts(const core::Hosts& hosts, int size) {
  core::check_hosts(hosts, size, "collectives");
  for (int replica = 1; replica < size; ++replica) {
    if (core::uses_card(hosts, 0, replica)) return true;
  }
  return false;
}

/// The replicas of the stage that `rank` waits for.
std::string others_of(int rank, int size) {
  if (size - 1 > kNamed) return "the other " + std::to_string(size - 1) + " replicas of the stage";
  std::string names;
  int left = size - 1;
  for (int replica = 0; replica < size; ++replica) {
    if (replica == rank) continue;
    names += std::to_string(replica);
    if (--left > 0) names += left == 1 ? " or " : ", ";
  }
  return (size == 2 ? "replica " : "one of replicas ") + names + " of the stage";
}

const at::Tensor& tensor_of(const comm::Collective& collective) {
  return static_cast<TensorBuffer&>(*collective.buffer).tensor();
}

}  // namespace

C10dCollectives::C10dCollectives(const Options& options, const std::string& group, c10::Device device,
                                 std::shared_ptr<NicArbiter> arbiter, std::shared_ptr<StreamClock> clock,
                                 std::shared_ptr<comm::SliceMeter> meter)
    : options_(options),
      uses_card_(spans_hosts(options.hosts, options.size)),
      makes_room_(uses_card_ && options.makes_room),
      group_(c10d::resolve_process_group(group)),
      stream_(side_stream(device, /*high_priority=*/false)),
      arbiter_(std::move(arbiter)),
      clock_(std::move(clock)),
      meter_(std::move(meter)),
      others_(others_of(options.rank, options.size)) {
  if (options_.size < 2 || group_->getRank() != options_.rank || group_->getSize() != options_.size) {
    throw std::invalid_argument("replica " + std::to_string(options_.rank) + " of " + std::to_string(options_.size) +
                                " is rank " + std::to_string(group_->getRank()) + " of " +
                                std::to_string(group_->getSize()) + " in the group of its stage");
  }
}

C10dCollectives::~C10dCollectives() { stop(); }

void C10dCollectives::start(Listener& listener) {
  listener_ = &listener;
  thread_ = std::thread([this] { loop(); });
  pthread_setname_np(thread_.native_handle(), comm::to_string(options_.traffic));
}

void C10dCollectives::push(comm::Collective collective) {
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return;
    queue_.push_back(std::move(collective));
  }
  changed_.notify_one();
}

void C10dCollectives::abort(const std::string&) noexcept {
  bool busy = false;
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return;
    stopped_ = true;
    busy = !queue_.empty();
  }
  changed_.notify_one();
  if (!busy) return;
  try {
    group_->abort();  // ends the library's kernels, which may wait for a replica that is gone
  } catch (const std::exception&) {
    // the library has ended it already, or cannot: its own time-out ends the kernels then
  }
}

void C10dCollectives::stop() noexcept {
  abort("the stream was closed");
  if (thread_.joinable()) thread_.join();
}

std::string C10dCollectives::waits_for() const {
  const std::lock_guard lock(mutex_);
  if (queue_.empty()) return {};
  const std::string whom = waits_for_own_rank_ ? "what this rank does before it" : others_;
  return "the " + name_of(options_.traffic, queue_.front()) + " waits for " + whom;
}

void C10dCollectives::loop() noexcept {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopped_ || !queue_.empty(); });
    if (stopped_) return;
    const comm::Collective& current = queue_.front();  // stays where it is while others are pushed
    lock.unlock();
    try {
      run(current);
    } catch (const std::exception& error) {
      lock.lock();
      if (stopped_) return;  // whoever aborted knows why
      lock.unlock();
      const bool is_late = dynamic_cast<const comm::TimeoutError*>(&error) != nullptr;
      listener_->failed(is_late ? comm::Failure::Kind::kTimeout : comm::Failure::Kind::kError,
                        name_of(options_.traffic, current) + " failed: " + error.what());
      return;
    }
    lock.lock();
    if (stopped_) return;
    std::shared_ptr<comm::Buffer> buffer = std::move(queue_.front().buffer);
    queue_.pop_front();
    lock.unlock();
    buffer.reset();  // without the lock: freeing a tensor may have to wait for the interpreter
    lock.lock();
  }
}

/// What a replica sends in a slice.
std::int64_t C10dCollectives::slice_bytes() const {
  if (options_.slice_bytes > 0) return static_cast<std::int64_t>(options_.slice_bytes);
  return makes_room_ ? core::SliceRule::bytes(options_.size, agreed_) : std::numeric_limits<std::int64_t>::max();
}

/// All replicas come here before the same collective.
void C10dCollectives::agree() {
  const c10::Device device = stream_.device();
  std::vector<at::Tensor> speed{at::full({1}, measured_, at::TensorOptions().dtype(at::kFloat).device(device))};
  c10d::AllreduceOptions least;
  least.reduceOp = c10d::ReduceOp::MIN;
  group_->allreduce(speed, least)->wait();
  const auto agreed = speed.front().item<float>();
  check();
  measured_ = 0;
  if (agreed <= 0) return;  // one of them had nothing to measure: as before
  agreed_ = agreed;
  arbiter_->set_bandwidth(agreed_);
}

/// A slice took so long; 0: nobody can say.
void C10dCollectives::note(Slice& slice, double seconds) {
  if (seconds > 0) {
    timed_bytes_ += slice.bytes;
    timed_seconds_ += seconds;
  }
  slice.bytes = 0;
}

/// The slices of a collective are over: together they say how fast the network is, which lets short bursts go faster.
void C10dCollectives::measure() {
  if (timed_seconds_ > 0) measured_ = std::max(measured_, timed_bytes_ / timed_seconds_);
  meter_->took(timed_bytes_, timed_seconds_);
  timed_bytes_ = timed_seconds_ = 0;
}

/// Waits for a slice, if there is one, and notes how fast it was. Those before it are finished.
void C10dCollectives::finish(Slice& slice) {
  await_own_rank(slice.begun);
  const double usual_s = agreed_ > 0 ? std::min(slice.bytes / agreed_, 1.0) : 0;
  await_replicas(slice.done, std::chrono::nanoseconds(static_cast<std::int64_t>(usual_s * 1e9)));
  if (slice.bytes > 0) note(slice, slice.done.seconds_since(slice.begun));
}

void C10dCollectives::run(const comm::Collective& collective) {
  const std::int64_t start_ns = comm::now_ns();
  const c10::StreamGuard guard(stream_);
  if (makes_room_ && core::SliceRule::agrees_before(++number_)) agree();
  for (const auto& buffer : {collective.sums, collective.buffer}) {
    if (!buffer) continue;
    const DeviceEvent& ready = static_cast<TensorBuffer&>(*buffer).ready();
    // As a stream's wait for it, it holds up this thread's collectives alone.
    if (makes_room_) await_own_rank(ready);
    check();
    ready.block(stream_);
  }
  const at::Tensor shards = tensor_of(collective).view({options_.size, -1});
  const std::int64_t others = options_.size - 1, shard_length = shards.size(1);
  const auto wire_bytes = static_cast<std::int64_t>(collective.wire_bytes());
  const std::int64_t slice_length = core::SliceRule::shard_length(slice_bytes(), options_.size, wire_bytes);
  at::Tensor rounded;  // what travels of a slice, where that is not what lies in the bucket
  if (collective.as_bfloat16) {
    rounded = at::empty({options_.size * std::min(slice_length, shard_length)}, shards.options().dtype(at::kBFloat16));
  }
  const auto sent = static_cast<std::size_t>(others * shard_length * wire_bytes);
  comm::Turn turn(*arbiter_, options_.traffic, NicArbiter::Direction::kSend, uses_card_);
  turn.take(sent);
  const comm::Moment begun = clock_->now(stream_);  // on a device once what is sent is there
  std::size_t index = 0;
  for (std::int64_t offset = 0; offset < shard_length; offset += slice_length) {
    Slice& slice = slices_[index++ % slices_.size()];
    finish(slice);  // the one before the last
    run_slice(collective, shards.narrow(1, offset, std::min(slice_length, shard_length - offset)), rounded, slice);
    slice.done.record(stream_);
  }
  const comm::Moment ended = clock_->now(stream_);
  if (!shards.is_cpu()) {  // the compute stream need not wait for this thread to hear that the device is done
    auto& buffer = static_cast<TensorBuffer&>(*collective.buffer);
    (options_.traffic == Traffic::kReduce ? buffer.ready() : buffer.gathered()).record(stream_);
    listener_->usable(options_.traffic, collective.bucket);
  }
  for (std::size_t last = 0; last < slices_.size(); ++last) finish(slices_[index++ % slices_.size()]);
  measure();
  check();  // what was aborted ends, too, with anything in its memory
  listener_->completed({.traffic = options_.traffic,
                        .bucket = collective.bucket,
                        .start_ns = start_ns,
                        .end_ns = comm::now_ns(),
                        .bytes = sent,
                        .times = clock_->is_of_device() ? std::make_shared<StreamInterval>(begun, ended) : nullptr});
}

/// `rows`: [replicas, length], a part of every shard. `rounded`: [replicas * length] or more where it is bfloat16 that
/// travels, else undefined.
void C10dCollectives::run_slice(const comm::Collective& collective, at::Tensor rows, const at::Tensor& rounded,
                                Slice& slice) {
  const std::int64_t length = rows.size(1);
  const std::int64_t bytes = (options_.size - 1) * length * static_cast<std::int64_t>(collective.wire_bytes());
  if (uses_card_) {
    arbiter_->hold_both_ways(options_.traffic, core::SliceRule::longest_hold_ns(bytes, agreed_));
  }
  check();
  const bool is_reduce = options_.traffic == Traffic::kReduce;
  const at::Tensor lying = rows;
  if (rounded.defined()) {
    rows = rounded.narrow(0, 0, options_.size * length).view({options_.size, length});
    is_reduce ? rows.copy_(lying) : rows[options_.rank].copy_(lying[options_.rank]);
  }
  const std::int64_t start_ns = comm::now_ns();
  slice.begun.record(stream_);
  is_reduce ? reduce_scatter(rows) : all_gather(rows);
  slice.bytes = static_cast<double>(bytes);
  // Host memory has no events, and the call has waited.
  if (rows.is_cpu()) note(slice, static_cast<double>(comm::now_ns() - start_ns) / 1e9);
  const at::Tensor own = lying[options_.rank];
  if (is_reduce) {
    if (rounded.defined()) own.copy_(rows[options_.rank]);
    if (collective.scale != 1.0) own.mul_(collective.scale);
    if (rounded.defined()) own.copy_(own.to(at::kBFloat16));
  } else if (rounded.defined()) {
    // The own shard is there, and may be read meanwhile (the norm).
    const std::int64_t rank = options_.rank, after = options_.size - rank - 1;
    if (rank > 0) lying.narrow(0, 0, rank).copy_(rows.narrow(0, 0, rank));
    if (after > 0) lying.narrow(0, rank + 1, after).copy_(rows.narrow(0, rank + 1, after));
  }
}

/// Whether a library's own collective takes the rows as they lie, and leaves the own row alone (NCCL's do "in place").
bool C10dCollectives::fits_the_library(const at::Tensor& rows) { return rows.is_contiguous() && !rows.is_cpu(); }

void C10dCollectives::reduce_scatter(const at::Tensor& rows) {
  if (!fits_the_library(rows)) return reduce_scatter_rows(*group_, rows);
  at::Tensor own = rows[options_.rank], all = rows.view(-1);
  group_->reduce_scatter_single(own, all)->wait();
}

void C10dCollectives::all_gather(const at::Tensor& rows) {
  if (!fits_the_library(rows)) return all_gather_rows(*group_, rows);
  at::Tensor own = rows[options_.rank], all = rows.view(-1);
  group_->all_gather_single(all, own)->wait();
}

/// Returns when the device has passed the mark before which it waits for nothing but what this rank computes, or the
/// stream was stopped. Without a limit of its own: no other rank is late, and those that wait for this one say so.
void C10dCollectives::await_own_rank(const DeviceEvent& mark) {
  bool is_passed = mark.query();
  if (!is_passed) {
    waits_for_own_rank_ = true;
    const comm::PollPeriod period;
    while (!(is_passed = mark.query()) && !is_stopped()) std::this_thread::sleep_for(period.next());
    waits_for_own_rank_ = false;
  }
  if (is_passed) mark.synchronize();  // some libraries say here what went wrong
}

/// Returns when the device has passed the mark, to which all replicas have to come, usually within such a time.
void C10dCollectives::await_replicas(const DeviceEvent& done, std::chrono::nanoseconds usual) const {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + options_.timeout;
  const comm::PollPeriod period(usual);
  while (!done.query()) {  // after abort(), too: until its kernels have ended they use the memory
    if (Clock::now() >= deadline) {
      throw comm::TimeoutError("this rank has computed its part, and waited " + comm::seconds(options_.timeout) +
                               " (setting comm_timeout) for " + others_);
    }
    std::this_thread::sleep_for(period.next());
  }
  done.synchronize();  // some libraries say here what went wrong
}

bool C10dCollectives::is_stopped() const {
  const std::lock_guard lock(mutex_);
  return stopped_;
}

void C10dCollectives::check() const {
  if (is_stopped()) throw comm::AbortedError("the stream was closed");
}

}  // namespace fold3d::runtime
