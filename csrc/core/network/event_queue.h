#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace fold3d::core {

/// Something that happens at a point of simulated time.
struct Event {
  enum class Type : std::uint8_t {
    kComputed,         ///< a rank has finished what it was computing (a = rank)
    kProduced,         ///< a rank's last backward has completed a bucket (a = rank, b = bucket)
    kCopied,           ///< a rank has what it waits for of its pool (a = rank)
    kArrived,          ///< a pipeline message is there (a = rank, b = action)
    kMessageSent,      ///< the last byte of a message has left (a = message)
    kBurstSent,        ///< a stretch of a data-parallel flow has left (a = flow, b = its version)
    kNetworkWake,      ///< a flow's patience with pipeline messages is over
    kCollectiveStart,  ///< the first byte of a reduce-scatter or gather may leave (a = collective)
    kCollectiveDone,   ///< a reduce-scatter or gather is complete on all its ranks (a = collective)
    kNormKnown,        ///< every rank knows the outcome of the norm
    kUpdated,          ///< a stage's ranks have updated their shares of a bucket (a) or, with a = -1, all (b = stage)
  };
  std::int64_t time = 0;
  std::uint64_t number = 0;  ///< order of pushing: the order of events at one time
  Type type = Type::kComputed;
  int a = 0;
  int b = 0;
};

/// Events in order of (time, order of pushing): deterministic.
class EventQueue {
 public:
  void push(std::int64_t time, Event::Type type, int a = 0, int b = 0) {
    heap_.push_back({time, pushed_++, type, a, b});
    std::push_heap(heap_.begin(), heap_.end(), later);
  }
  bool empty() const { return heap_.empty(); }
  Event pop() {
    std::pop_heap(heap_.begin(), heap_.end(), later);
    const Event event = heap_.back();
    heap_.pop_back();
    return event;
  }

 private:
  static bool later(const Event& x, const Event& y) { return x.time != y.time ? x.time > y.time : x.number > y.number; }

  std::vector<Event> heap_;
  std::uint64_t pushed_ = 0;
};

}  // namespace fold3d::core
