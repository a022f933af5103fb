#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace fold3d::comm {

/// A point in time, in nanoseconds of the clock of every record. When a device comes to one is known some time later.
class Moment {
 public:
  /// One that has not come yet. Thread-safe.
  class Later {
   public:
    virtual ~Later() = default;
    /// When it was; nullopt: it has not been seen to have come.
    virtual std::optional<std::int64_t> ns() = 0;
    /// Blocks the calling thread until ns() has an answer.
    virtual void wait() = 0;
  };

  Moment(std::int64_t ns) : ns_(ns) {}  // NOLINT(google-explicit-constructor): most are known
  explicit Moment(std::shared_ptr<Later> later) : later_(std::move(later)) {}

  std::optional<std::int64_t> ns() const { return later_ ? later_->ns() : std::optional(ns_); }
  void wait() const {
    if (later_) later_->wait();
  }

 private:
  std::int64_t ns_ = 0;
  std::shared_ptr<Later> later_;
};

/// From when to when.
struct Interval {
  std::int64_t start_ns = 0, end_ns = 0;
};

/// When a device has done what it was told to, known some time later. Thread-safe.
class LaterInterval {
 public:
  virtual ~LaterInterval() = default;
  virtual std::optional<Interval> known() = 0;
};

/// Moves those elements out of `all` that stand before the first of which not all times are known.
template <class T, class IsKnown>
std::vector<T> take_known(std::vector<T>& all, IsKnown is_known) {
  const auto end = std::find_if_not(all.begin(), all.end(), is_known);
  std::vector<T> known(std::make_move_iterator(all.begin()), std::make_move_iterator(end));
  all.erase(all.begin(), end);
  return known;
}

}  // namespace fold3d::comm
