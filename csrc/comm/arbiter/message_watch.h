#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "comm/arbiter/nic_arbiter.h"

namespace fold3d::comm {

/// Tells the arbiter of messages that a device sends or receives by itself, long after the host told it to: a message
/// is pending from the moment its data is there, at its sender, until it is through, whenever it was launched. A thread
/// looks; nobody waits for it. Thread-safe.
class MessageWatch {
 public:
  /// A message that was launched, or a tensor of one. All calls return at once and come from the watch's thread; what
  /// a question throws counts as true: whoever waits for the device hears of its errors.
  struct Transit {
    NicArbiter::Direction direction = NicArbiter::Direction::kSend;
    std::size_t bytes = 0;
    std::function<bool()> is_ready;         ///< the sender's device has its data
    std::function<bool()> is_through;       ///< it has left or arrived, or failed
    std::function<void()> when_ready = {};  ///< called once, when it was found ready
  };
  static constexpr std::size_t kLines = 4;

  explicit MessageWatch(std::shared_ptr<NicArbiter> arbiter);
  /// Ends the thread; what is pending ends with it.
  ~MessageWatch();
  MessageWatch(const MessageWatch&) = delete;
  MessageWatch& operator=(const MessageWatch&) = delete;

  /// What was launched on a line, below kLines, behind what was launched there before. Never blocks.
  void push(std::size_t line, Transit transit);

 private:
  /// Those of a line travel one after the other; the first may be pending.
  struct Line {
    std::deque<Transit> transits;
    bool is_pending = false;
  };

  void loop();
  bool look(Line& line, std::unique_lock<std::mutex>& lock);
  void begins(const Transit& transit);

  const std::shared_ptr<NicArbiter> arbiter_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<Line, kLines> lines_;
  bool stopped_ = false;
  std::thread thread_;  // last: starts when everything above exists
};

}  // namespace fold3d::comm
