#include "comm/bucket/bucket_sync.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "comm/base/clock.h"
#include "comm/base/errors.h"

namespace fold3d::comm {
namespace {

using Traffic = NicArbiter::Traffic;

std::string name_of(int bucket) { return "bucket " + std::to_string(bucket); }

}  // namespace

BucketSync::BucketSync(Options options, std::shared_ptr<NicArbiter> arbiter,
                       std::unique_ptr<CollectiveStream> reduce_stream, std::unique_ptr<CollectiveStream> gather_stream)
    : options_(std::move(options)),
      arbiter_(std::move(arbiter)),
      reduce_stream_(std::move(reduce_stream)),
      gather_stream_(std::move(gather_stream)) {
  if (options_.timeout.count() <= 0) throw std::invalid_argument("the timeout (setting comm_timeout) must be positive");
  reduce_stream_->start(*this);
  gather_stream_->start(*this);
}

BucketSync::~BucketSync() { close(); }

BucketSync::Bucket& BucketSync::bucket(int number) {
  if (number < 0) throw std::invalid_argument("there is no " + name_of(number) + ": buckets count from 0");
  const auto index = static_cast<std::size_t>(number);
  if (index >= buckets_.size()) buckets_.resize(index + 1);
  return buckets_[index];
}

void BucketSync::begin(std::int64_t step, const std::vector<int>& gather_order) {
  failure_.check();
  const std::lock_guard lock(mutex_);
  for (const Slot& slot : slots_) {
    if (slot.collective.buffer) continue;
    throw std::logic_error(options_.name + ": step " + std::to_string(step) + " begins, but " + name_of(slot.bucket) +
                           " of step " + std::to_string(slot.step) + ", whose gather is planned, was never reduced");
  }
  if (begun_ && step <= step_) {
    throw std::logic_error(options_.name + ": step " + std::to_string(step) + " begins after step " +
                           std::to_string(step_));
  }
  std::vector<int> sorted = gather_order;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end() || (!sorted.empty() && sorted.front() < 0)) {
    throw std::invalid_argument(options_.name + ": the gather order names a bucket twice, or one below 0");
  }
  step_ = step;
  begun_ = true;
  for (const int number : gather_order) slots_.push_back({.bucket = number, .step = step});
}

void BucketSync::reduce(Collective collective) {
  failure_.check();
  const std::lock_guard lock(mutex_);
  if (!begun_) throw std::logic_error(options_.name + ": reduce() before begin()");
  const int number = collective.bucket;
  Bucket& of = bucket(number);
  if (of.reducing || of.reduced_step == step_) {
    throw std::logic_error(options_.name + ": " + name_of(number) + " is reduced twice in step " +
                           std::to_string(step_));
  }
  if (of.gathering > 0) {
    throw std::logic_error(options_.name + ": " + name_of(number) + " is reduced in step " + std::to_string(step_) +
                           " while its gather of the step before is under way; wait_gathered() first");
  }
  collective.step = step_;
  check_collective(Traffic::kReduce, collective, options_.size);
  reduce_stream_->push(collective);
  ++reduces_.count;
  of.reduced_step = step_;
  of.reducing = true;
  const auto planned = std::find_if(slots_.begin(), slots_.end(),
                                    [&](const Slot& s) { return s.step == step_ && s.bucket == number && !s.ready; });
  if (planned == slots_.end()) return;
  planned->collective = std::move(collective);
  of.gathering = 1;
}

void BucketSync::gather(Collective collective) {
  failure_.check();
  const std::lock_guard lock(mutex_);
  if (!begun_) throw std::logic_error(options_.name + ": gather() before begin()");
  Bucket& of = bucket(collective.bucket);
  collective.step = step_;
  check_collective(Traffic::kGather, collective, options_.size);
  ++of.gathering;
  slots_.push_back(
      {.bucket = collective.bucket, .step = step_, .ready = !of.reducing, .collective = std::move(collective)});
  push_ready_gathers();
}

/// With the lock: two threads at once must not swap the order. The streams take what they are given without waiting.
void BucketSync::push_ready_gathers() {
  while (!slots_.empty() && slots_.front().ready) {
    gather_stream_->push(std::move(slots_.front().collective));
    ++gathers_.count;
    slots_.pop_front();
  }
}

void BucketSync::usable(Traffic traffic, int number) {
  {
    const std::lock_guard lock(mutex_);
    now_usable(traffic, number);
    running(traffic).is_usable = true;
  }
  changed_.notify_all();
}

void BucketSync::completed(const CollectiveRecord& record) {
  {
    const std::lock_guard lock(mutex_);
    records_.push_back(record);
    Running& of = running(record.traffic);
    --of.count;
    if (!std::exchange(of.is_usable, false)) now_usable(record.traffic, record.bucket);
  }
  changed_.notify_all();
}

/// With the lock.
void BucketSync::now_usable(Traffic traffic, int number) {
  Bucket& of = bucket(number);
  if (traffic == Traffic::kGather) {
    --of.gathering;
    return;
  }
  of.reducing = false;
  for (Slot& slot : slots_) {
    if (slot.bucket == number && slot.collective.buffer) slot.ready = true;
  }
  push_ready_gathers();
}

void BucketSync::wait_reduced(int number, std::optional<std::int64_t> step) {
  failure_.check();
  {
    const std::lock_guard lock(mutex_);
    const std::int64_t of = step.value_or(step_);
    if (!begun_ || bucket(number).reduced_step != of) {
      throw std::logic_error(options_.name + ": " + name_of(number) + " was not handed to reduce() in step " +
                             std::to_string(of));
    }
  }
  wait("reduce of " + name_of(number), Traffic::kReduce, [this, number] { return !bucket(number).reducing; });
}

void BucketSync::wait_gathered(int number) {
  wait("gather of " + name_of(number), Traffic::kGather, [this, number] { return bucket(number).gathering == 0; });
}

void BucketSync::drain() {
  wait("end of DP.sync", Traffic::kGather, [this] { return reduces_.count == 0 && gathers_.count == 0; });
}

bool BucketSync::is_gathered(int number) {
  failure_.check();
  const std::lock_guard lock(mutex_);
  return bucket(number).gathering == 0;
}

template <class Done>
void BucketSync::wait(const std::string& what, Traffic traffic, Done done) {
  using Clock = std::chrono::steady_clock;
  auto deadline = Clock::now() + options_.timeout;
  std::unique_lock lock(mutex_);
  const auto look = [&] {
    return changed_.wait_until(lock, std::min(deadline, Clock::now() + kLook),
                               [&] { return failure_.is_set() || done(); });
  };
  bool ended = look();
  while (!ended) {
    // As long as this rank has not done its own part, nobody is late; the others have limits of their own.
    if (reduce_stream_->waits_for_own_rank() || gather_stream_->waits_for_own_rank()) {
      deadline = Clock::now() + options_.timeout;
    } else if (Clock::now() >= deadline) {
      break;
    }
    lock.unlock();
    if (options_.while_waiting) options_.while_waiting();
    lock.lock();
    ended = look();
  }
  if (ended && !failure_.is_set()) return;
  if (!failure_.is_set()) {
    const std::string text = options_.name + ": the " + what + " was not done after " + seconds(options_.timeout) +
                             " (setting comm_timeout): " + cause_of_wait(traffic);
    lock.unlock();
    fail(Failure::Kind::kTimeout, text);
  }
  failure_.check();
}

/// Why nothing of a kind gets on.
std::string BucketSync::cause_of_wait(Traffic traffic) const {
  if (traffic == Traffic::kGather) {
    if (const std::string text = gather_stream_->waits_for(); !text.empty()) return text;
    if (!slots_.empty() && !slots_.front().collective.buffer) {
      return "its turn comes after " + name_of(slots_.front().bucket) + ", which this rank has not reduced";
    }
  }
  const std::string text = reduce_stream_->waits_for();
  return text.empty() ? "nothing is under way" : text;
}

std::vector<CollectiveRecord> BucketSync::take_records() {
  const std::lock_guard lock(mutex_);
  return take_known(records_, [](CollectiveRecord& record) {
    if (!record.times) return true;
    const std::optional<Interval> known = record.times->known();
    if (!known) return false;
    record.start_ns = known->start_ns;
    record.end_ns = known->end_ns;
    return true;
  });
}

void BucketSync::failed(Failure::Kind kind, const std::string& text) { fail(kind, options_.name + ": " + text); }

void BucketSync::fail(Failure::Kind kind, const std::string& text) noexcept {
  if (!failure_.set(kind, text)) return;
  reduce_stream_->abort(text);
  gather_stream_->abort(text);
  arbiter_->open();  // after that: who was held there must not begin anything
  {
    const std::lock_guard lock(mutex_);
  }  // whoever looked at the failure before is waiting now
  changed_.notify_all();
}

void BucketSync::abort(const std::string& reason) noexcept { fail(Failure::Kind::kAborted, reason); }

void BucketSync::close() noexcept {
  fail(Failure::Kind::kAborted, options_.name + " closed its bucket sync");
  reduce_stream_->stop();
  gather_stream_->stop();
}

}  // namespace fold3d::comm
