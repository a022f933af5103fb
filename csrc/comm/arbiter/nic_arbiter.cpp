#include "comm/arbiter/nic_arbiter.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <stdexcept>
#include <utility>

#include "comm/base/clock.h"
#include "comm/base/errors.h"

namespace fold3d::comm {
namespace {

constexpr std::uint64_t kVersion = 0x4633444741544532;  // "F3DGATE2"
constexpr unsigned kFieldBits = 21;
constexpr std::uint64_t kFieldMask = (1u << kFieldBits) - 1;
constexpr std::size_t kSlices = 2;   // the kinds before it are the directions of messages,
constexpr std::size_t kTensors = 3;  // from here on those of TP.sync
constexpr std::size_t kFieldsOfWord = 3;

// The state is shared between processes: what is not lock-free would hide a lock in each of them.
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));  // as the futex call wants it

constexpr std::size_t word_of(std::size_t kind) { return kind / kFieldsOfWord; }

constexpr std::uint64_t one_of(std::size_t kind) { return std::uint64_t{1} << (kFieldBits * (kind % kFieldsOfWord)); }

int count_of(std::uint64_t word, std::size_t kind) {
  return static_cast<int>(word >> (kFieldBits * (kind % kFieldsOfWord)) & kFieldMask);
}

std::size_t kind_of(NicArbiter::Direction direction) { return static_cast<std::size_t>(direction); }

std::size_t tensors_of(NicArbiter::Direction direction) { return kTensors + kind_of(direction); }

void raise_to(std::atomic<std::int64_t>& target, std::int64_t value) {
  std::int64_t seen = target.load();
  while (seen < value && !target.compare_exchange_weak(seen, value)) {
  }
}

long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* until) {
  return ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, until, nullptr,
                   FUTEX_BITSET_MATCH_ANY);
}

}  // namespace

NicArbiter::NicArbiter() : NicArbiter("", Options{}) {}

NicArbiter::NicArbiter(const std::string& shared_name) : NicArbiter(shared_name, Options{}) {}

NicArbiter::NicArbiter(const std::string& shared_name, const Options& options)
    : rule_(options.rule),
      preempt_(options.preempt),
      first_(options.gathers_first ? Traffic::kGather : Traffic::kReduce),
      memory_(shared_name, sizeof(State)),
      state_(*static_cast<State*>(memory_.data())) {
  std::uint64_t version = 0;
  if (!state_.version.compare_exchange_strong(version, kVersion) && version != kVersion) {
    throw CommError("shared memory " + shared_name +
                    " is not a arbiter of this version; run the same version of fold3d on every rank");
  }
}

NicArbiter::~NicArbiter() { take_back(); }

void NicArbiter::begins(std::size_t kind, std::size_t bytes) {
  Urgent& urgent = state_.urgent[kind];
  const std::int64_t bytes_per_second = state_.bytes_per_second.load();
  const std::int64_t transfer_ns =
      bytes_per_second == 0
          ? 0
          : static_cast<std::int64_t>(std::min(static_cast<double>(bytes) * 1e9 / static_cast<double>(bytes_per_second),
                                               static_cast<double>(core::HoldRule::kLongestTransferNs)));
  // Two that begin at once may both see silence; what is lost then is a little patience.
  if (pending(kind) == 0) urgent.transfer_ns.store(0);
  raise_to(urgent.transfer_ns, transfer_ns);
  raise_to(urgent.newest_ns, now_ns());
  // In this order nothing is taken back that is not there yet.
  state_.pending[word_of(kind)].fetch_add(one_of(kind));
  own_[kind].fetch_add(1);
  if (open_.load()) take_back();  // open() may have looked before
}

void NicArbiter::ends(std::size_t kind, std::int64_t count) noexcept {
  const std::uint64_t before =
      state_.pending[word_of(kind)].fetch_sub(one_of(kind) * static_cast<std::uint64_t>(count));
  if (count_of(before, kind) == count) wake();
}

void NicArbiter::take_back() noexcept {
  if (!process_.is_here()) return;
  for (std::size_t kind = 0; kind < kNumKinds; ++kind) {
    const std::int64_t count = own_[kind].exchange(0);
    if (count > 0) ends(kind, count);
  }
}

void NicArbiter::message_begins(Direction direction, std::size_t bytes) {
  begins(kind_of(direction), bytes);
  message_bytes_.fetch_add(static_cast<std::int64_t>(bytes), std::memory_order_relaxed);
  messages_.fetch_add(1);
}

void NicArbiter::message_ends(Direction direction) { end_own(kind_of(direction)); }

void NicArbiter::slice_begins(std::size_t bytes) { begins(kSlices, bytes); }

void NicArbiter::slice_ends() { end_own(kSlices); }

void NicArbiter::tensor_begins(Direction direction, std::size_t bytes) { begins(tensors_of(direction), bytes); }

void NicArbiter::tensor_ends(Direction direction) { end_own(tensors_of(direction)); }

int NicArbiter::pending(std::size_t kind) const { return count_of(state_.pending[word_of(kind)].load(), kind); }

void NicArbiter::end_own(std::size_t kind) {
  std::int64_t count = own_[kind].load();
  while (count > 0 && !own_[kind].compare_exchange_weak(count, count - 1)) {
  }
  if (count > 0) ends(kind, 1);  // else it was taken back
}

/// The time before which `kind` holds back a slice that has been ready since `ready_ns`.
std::int64_t NicArbiter::start_ns(std::int64_t ready_ns, std::size_t kind) const {
  const Urgent& urgent = state_.urgent[kind];
  return rule_.start_ns(
      ready_ns,
      {.pending = pending(kind), .newest_ns = urgent.newest_ns.load(), .transfer_ns = urgent.transfer_ns.load()});
}

std::int64_t NicArbiter::hold_message(Direction direction) {
  const Held held = hold_for({.kinds = {tensors_of(direction)}, .count = 1}, kUnlimited);
  if (held.ns == 0) return 0;
  message_holds_.fetch_add(1, std::memory_order_relaxed);
  message_held_ns_.fetch_add(held.ns, std::memory_order_relaxed);
  return held.ns;
}

NicArbiter::Urgency NicArbiter::urgency_of(Direction direction, Traffic traffic) const {
  return {.kinds = {tensors_of(direction), kind_of(direction), kSlices}, .count = traffic == first_ ? 2u : 3u};
}

std::int64_t NicArbiter::hold(Direction direction, Traffic traffic, std::int64_t limit_ns) {
  return hold_slice(urgency_of(direction, traffic), limit_ns);
}

std::int64_t NicArbiter::longest_ns(Direction direction, Traffic traffic) const {
  const Urgency urgency = urgency_of(direction, traffic);
  std::int64_t longest = 0;
  if (!preempt_) return longest;
  for (const std::size_t kind : std::span(urgency.kinds.data(), urgency.count)) {
    if (pending(kind) > 0) longest = std::max(longest, state_.urgent[kind].transfer_ns.load());
  }
  return longest;
}

std::int64_t NicArbiter::hold_both_ways(Traffic traffic, std::int64_t limit_ns) {
  constexpr Direction kSend = Direction::kSend, kReceive = Direction::kReceive;
  return hold_slice({.kinds = {tensors_of(kSend), tensors_of(kReceive), kind_of(kSend), kind_of(kReceive), kSlices},
                     .count = traffic == first_ ? 4u : 5u},
                    limit_ns);
}

std::int64_t NicArbiter::hold_slice(const Urgency& urgency, std::int64_t limit_ns) {
  const Held held = hold_for(urgency, limit_ns);
  if (held.ns == 0) return 0;
  (held.for_urgent ? preemptions_ : yields_).fetch_add(1, std::memory_order_relaxed);
  held_ns_.fetch_add(held.ns, std::memory_order_relaxed);
  if (held.for_urgent) preempted_ns_.fetch_add(held.ns, std::memory_order_relaxed);
  return held.ns;
}

NicArbiter::Held NicArbiter::hold_for(const Urgency& urgency, std::int64_t limit_ns) {
  const std::span<const std::size_t> kinds(urgency.kinds.data(), urgency.count);
  if (!preempt_ || std::ranges::none_of(kinds, [this](std::size_t kind) { return pending(kind) > 0; })) return {};
  const std::int64_t ready_ns = now_ns();
  const std::int64_t latest_ns = limit_ns < kUnlimited - ready_ns ? ready_ns + limit_ns : kUnlimited;
  std::int64_t now = ready_ns;
  bool for_urgent = false;
  for (;;) {
    // Read first: whatever ends after what we look at below moves it, and the wait returns at once.
    const std::uint32_t sequence = state_.sequence.load();
    if (open_.load()) break;
    std::int64_t until_ns = now;
    for (const std::size_t kind : kinds) {
      const std::int64_t kind_ns = std::min(start_ns(ready_ns, kind), latest_ns);
      until_ns = std::max(until_ns, kind_ns);
      for_urgent = for_urgent || (kind_ns > now && kind != kSlices);
    }
    if (until_ns <= now) break;
    // Who begins meanwhile moves the time; that is looked at when the time has come.
    wait(sequence, until_ns);
    now = now_ns();
  }
  return {now - ready_ns, for_urgent};  // 0: patience was over already
}

void NicArbiter::passed(Direction direction, std::int64_t start_ns, std::int64_t end_ns) noexcept {
  const std::size_t kind = kind_of(direction);
  if (pending(kind) == 0) return;
  // The newest message stands for all: slices are short.
  const std::int64_t began_ns = std::max(start_ns, state_.urgent[kind].newest_ns.load());
  if (began_ns < end_ns) delayed_ns_.fetch_add(end_ns - began_ns, std::memory_order_relaxed);
}

void NicArbiter::wait(std::uint32_t sequence, std::int64_t until_ns) {
  // FUTEX_WAIT_BITSET takes a time of CLOCK_MONOTONIC, which is steady_clock's.
  const timespec until{.tv_sec = static_cast<time_t>(until_ns / 1'000'000'000),
                       .tv_nsec = static_cast<long>(until_ns % 1'000'000'000)};
  state_.waiters.fetch_add(1);
  futex(state_.sequence, FUTEX_WAIT_BITSET, sequence, &until);
  state_.waiters.fetch_sub(1);
}

void NicArbiter::wake() noexcept {
  // Sequentially consistent with wait(): either it sees another sequence, or we see that it waits.
  state_.sequence.fetch_add(1);
  if (state_.waiters.load() > 0) {
    futex(state_.sequence, FUTEX_WAKE_BITSET, static_cast<std::uint32_t>(std::numeric_limits<int>::max()), nullptr);
  }
}

void NicArbiter::set_bandwidth(double bytes_per_second) {
  if (!(bytes_per_second >= 0) || std::isinf(bytes_per_second)) {
    throw std::invalid_argument("arbiter: the bandwidth must be a number of bytes per second, not negative");
  }
  state_.bytes_per_second.store(static_cast<std::int64_t>(std::min(bytes_per_second, 1e15)));
}

void NicArbiter::open() noexcept {
  open_.store(true);
  take_back();
  wake();
}

void NicArbiter::unlink() noexcept { memory_.unlink(); }

NicArbiter::Counters NicArbiter::counters() const {
  return {.preemptions = preemptions_.load(),
          .yields = yields_.load(),
          .held_ns = held_ns_.load(),
          .preempted_ns = preempted_ns_.load(),
          .delayed_ns = delayed_ns_.load(),
          .messages = messages_.load(),
          .message_bytes = message_bytes_.load(),
          .message_holds = message_holds_.load(),
          .message_held_ns = message_held_ns_.load()};
}

}  // namespace fold3d::comm
