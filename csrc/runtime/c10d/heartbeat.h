// Heartbeat: signs of life of a process, which need no GIL.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "comm/arbiter/own_process.h"

namespace fold3d::runtime {

/// Writes "NUMBER TEXT" to a key of the job's store once per period, on a thread and a connection of its own: a process
/// that holds Python's GIL for minutes is alive. Only a process that is stopped or dead leaves it out.
class Heartbeat {
 public:
  /// Returns when the first sign has left, or after some seconds: whoever keeps the store may be stopped.
  Heartbeat(c10::intrusive_ptr<c10d::Store> store, std::string key, std::chrono::milliseconds period, std::string text);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  /// Writes `text` now, and from now on; any thread.
  void say(std::string text);
  /// The last thing that is written; waits for it a second at most. Idempotent; does nothing in a forked child.
  void close(std::string last);

 private:
  struct State;
  static void beat(State& state) noexcept;

  const comm::OwnProcess own_;
  const std::shared_ptr<State> state_;  // the thread's, too, which may have to be left behind
  std::thread thread_;
};

}  // namespace fold3d::runtime
