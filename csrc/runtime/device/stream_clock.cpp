#include "runtime/device/stream_clock.h"

#include <c10/core/Event.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/base/clock.h"
#include "runtime/device/device.h"

namespace fold3d::runtime {
namespace {

constexpr double kNsPerMs = 1e6;

/// Events that note the time, to be used again.
class EventPool {
 public:
  explicit EventPool(c10::DeviceType type) : type_(type) {}

  c10::Event take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return c10::Event(type_, c10::EventFlag::BACKEND_DEFAULT);
    c10::Event event = std::move(free_.back());
    free_.pop_back();
    return event;
  }

  void give_back(c10::Event event) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(event));
  }

 private:
  const c10::DeviceType type_;
  std::mutex mutex_;
  std::vector<c10::Event> free_;
};

/// An event of the pool for as long as somebody holds it.
class PooledEvent {
 public:
  explicit PooledEvent(std::shared_ptr<EventPool> pool) : pool_(std::move(pool)), event_(pool_->take()) {}
  ~PooledEvent() { pool_->give_back(std::move(event_)); }
  PooledEvent(const PooledEvent&) = delete;
  PooledEvent& operator=(const PooledEvent&) = delete;

  c10::Event& operator*() { return event_; }
  c10::Event* operator->() { return &event_; }

 private:
  const std::shared_ptr<EventPool> pool_;
  c10::Event event_;
};

/// What the device's clock may lose against the host's: more than any does.
constexpr double kDrift = 1e-4;

/// Where both clocks are known. The device passes it late rather than early, so the host's clock was there as late as
/// this one says, or as late as the one before has it.
class Anchor {
 public:
  Anchor(const std::shared_ptr<EventPool>& pool, const c10::Stream& stream, std::shared_ptr<Anchor> before)
      : before_(std::move(before)), host_ns_(comm::now_ns()), event_(pool) {
    event_->record(stream);
  }

  /// When `event`, which is passed, was; nullopt: the device has not passed the anchor.
  std::optional<std::int64_t> time_of(c10::Event& event) {
    const std::lock_guard lock(mutex_);
    if (!resolve()) return std::nullopt;
    return host_ns_ + std::llround(kNsPerMs * event_->elapsedTime(event));
  }

  /// Whether the device has passed it.
  bool is_passed() {
    const std::lock_guard lock(mutex_);
    return resolve();
  }

  void wait() { event_->synchronize(); }

 private:
  bool resolve() {
    if (is_resolved_) return true;
    if (!event_->query()) return false;
    if (const auto before = std::exchange(before_, nullptr)) {
      const auto by_before = before->time_of(*event_);
      if (by_before) {
        const auto passed = static_cast<double>(*by_before - before->host_ns_);
        host_ns_ = std::max<std::int64_t>(host_ns_, *by_before - std::llround(kDrift * passed));
      }
    }
    return is_resolved_ = true;
  }

  std::mutex mutex_;
  bool is_resolved_ = false;
  std::shared_ptr<Anchor> before_;  // a passed one, until this one is
  std::int64_t host_ns_;
  PooledEvent event_;
};

}  // namespace

struct StreamClock::State {
  explicit State(c10::Device device)
      : pool(std::make_shared<EventPool>(device.type())),
        idle(side_stream(device, /*high_priority=*/true)),
        anchor(std::make_shared<Anchor>(pool, idle, nullptr)) {}

  const std::shared_ptr<EventPool> pool;
  const c10::Stream idle;
  std::mutex mutex;
  std::shared_ptr<Anchor> anchor;  // of this step; guarded by the mutex
};

class StreamClock::Point final : public comm::Moment::Later {
 public:
  Point(const std::shared_ptr<EventPool>& pool, std::shared_ptr<Anchor> anchor, const c10::Stream& stream)
      : anchor_(std::move(anchor)) {
    event_.emplace(pool);
    (*event_)->record(stream);
  }

  std::optional<std::int64_t> ns() override {
    const std::lock_guard lock(mutex_);
    if (!ns_ && (*event_)->query()) resolve();
    return ns_;
  }

  void wait() override {
    const std::lock_guard lock(mutex_);
    if (ns_) return;
    if (!(*event_)->query()) (*event_)->synchronize();
    if (!anchor_->is_passed()) anchor_->wait();
    resolve();
  }

 private:
  void resolve() {
    ns_ = anchor_->time_of(**event_);
    if (!ns_) return;
    event_.reset();
    anchor_.reset();
  }

  std::mutex mutex_;
  std::shared_ptr<Anchor> anchor_;
  std::optional<PooledEvent> event_;
  std::optional<std::int64_t> ns_;
};

StreamClock::StreamClock(c10::Device device) : device_(device) {
  if (device.is_cpu()) return;
  try {
    auto state = std::make_shared<State>(device);
    Point(state->pool, state->anchor, state->idle).wait();
    state_ = std::move(state);
  } catch (const c10::Error&) {
    // its events note no time, or it has none
  }
}

StreamClock::~StreamClock() = default;

void StreamClock::anchor() {
  if (!state_) return;
  const std::lock_guard lock(state_->mutex);
  auto before = state_->anchor->is_passed() ? state_->anchor : nullptr;
  state_->anchor = std::make_shared<Anchor>(state_->pool, state_->idle, std::move(before));
}

comm::Moment StreamClock::now(const c10::Stream& stream) {
  if (!state_) return comm::now_ns();
  std::shared_ptr<Anchor> anchor;
  {
    const std::lock_guard lock(state_->mutex);
    anchor = state_->anchor;
  }
  return comm::Moment(std::make_shared<Point>(state_->pool, std::move(anchor), stream));
}

comm::Moment StreamClock::now() { return state_ ? now(current_stream(device_)) : comm::Moment(comm::now_ns()); }

}  // namespace fold3d::runtime
