// StreamClock: when a device comes to points of its streams, on the host's clock.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>

#include "comm/base/moment.h"

namespace fold3d::runtime {

/// Marks points of streams by events that note the time. Nobody waits for them: whoever wants to know when a point was
/// asks after the device has passed it, as a rule a step later. Thread-safe.
///
/// The device's clock has an origin of its own. anchor(), once per step, records an event on a stream on which nothing
/// else is queued, so the device passes it at once; a point's time is the host's at that call plus what the device
/// counts between the two events. If the anchor before says that it was later, it was: so all times are early by as
/// long as the promptest of those launches took (microseconds on an idle stream), and by up to a ten-thousandth of the
/// time since then. Lengths are the device's own.
///
/// On the CPU, and where the device's events note no time, points are when the host says so.
class StreamClock {
 public:
  /// Tries the device's events; waits for the two of them.
  explicit StreamClock(c10::Device device);
  ~StreamClock();

  /// Whether now() is the device's time: false on the CPU.
  bool is_of_device() const { return state_ != nullptr; }

  /// Whether now() is when things happen: false on a device whose events note no time.
  bool tells_time() const { return state_ != nullptr || device_.is_cpu(); }

  /// A step begins.
  void anchor();

  /// When everything queued on `stream` up to now is done.
  comm::Moment now(const c10::Stream& stream);
  /// The same of the calling thread's current stream; on the CPU, now.
  comm::Moment now();

 private:
  struct State;
  class Point;

  const c10::Device device_;
  std::shared_ptr<State> state_;  // null: the host's clock is all there is
};

/// What lies between two points of a stream.
class StreamInterval : public comm::LaterInterval {
 public:
  StreamInterval(comm::Moment start, comm::Moment end) : start_(std::move(start)), end_(std::move(end)) {}

  std::optional<comm::Interval> known() override {
    const auto end = end_.ns(), start = end ? start_.ns() : std::nullopt;
    return start ? std::optional(comm::Interval{*start, *end}) : std::nullopt;
  }

 private:
  comm::Moment start_, end_;
};

}  // namespace fold3d::runtime
