// Streams and events for CPU and CUDA in one place. On CPU everything is already complete when it returns, so all of
// it is a no-op; on CUDA c10's device-generic guards are used, so no CUDA header is needed to build this.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>
#include <exception>
#include <optional>

namespace fold3d::runtime {

/// A point in a device's stream. Not thread-safe; hand it over with the memory it guards.
class DeviceEvent {
 public:
  enum class Clock : std::uint8_t { kNone, kDevice };

  /// `clock`: kDevice: the device notes when it passes the mark.
  explicit DeviceEvent(Clock clock = Clock::kNone) : clock_(clock) {}

  /// Marks everything queued on `stream` up to now. CPU: nothing to mark.
  void record(const c10::Stream& stream) {
    if (stream.device().is_cpu()) return;
    if (!event_) {
      const bool is_timed = clock_ == Clock::kDevice;
      event_.emplace(stream.device_type(),
                     is_timed ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT);
    }
    event_->record(stream);
  }

  /// Makes later work on `stream` wait for the mark; returns at once.
  void block(const c10::Stream& stream) const {
    if (event_) event_->block(stream);
  }

  /// Whether the device has passed the mark, or there is none.
  bool query() const { return !event_ || event_->query(); }

  /// Seconds between two marks with the device's clock that the device has passed. 0: nobody can say.
  double seconds_since(const DeviceEvent& earlier) const {
    if (!event_ || !earlier.event_) return 0;
    try {
      return earlier.event_->elapsedTime(*event_) / 1e3;
    } catch (const std::exception&) {
      return 0;  // its events have no times
    }
  }

  /// Blocks the calling thread until the device has passed the mark; at once if there is none.
  void synchronize() const {
    if (event_) event_->synchronize();
  }

 private:
  Clock clock_;
  std::optional<c10::Event> event_;
};

/// The calling thread's current stream of `device`.
inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/// A stream beside the compute stream, from the high-priority pool when `high_priority`. CPU: the only stream there is.
inline c10::Stream side_stream(c10::Device device, bool high_priority) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return device.is_cpu() ? guard.getStream(device) : guard.getStreamFromGlobalPool(device, high_priority);
}

}  // namespace fold3d::runtime
