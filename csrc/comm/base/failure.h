#pragma once

#include <atomic>
#include <mutex>
#include <string>

namespace fold3d::comm {

/// The first error of a communicator. Kept as kind and text, not as exception_ptr: every caller gets an
/// exception object of its own, so none is shared between threads. Thread-safe.
class Failure {
 public:
  enum class Kind { kError, kTimeout, kProtocol, kAborted };

  /// Keeps the first error. Returns whether this was it.
  bool set(Kind kind, const std::string& text);
  bool is_set() const { return set_.load(std::memory_order_acquire); }
  /// Throws the kept error, if there is one, as CommError, TimeoutError, ProtocolError or AbortedError.
  void check() const;

 private:
  std::mutex mutex_;
  std::atomic<bool> set_{false};  // kind_ and text_ never change once it is true
  Kind kind_ = Kind::kError;
  std::string text_;
};

}  // namespace fold3d::comm
