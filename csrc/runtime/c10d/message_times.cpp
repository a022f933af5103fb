#include "runtime/c10d/message_times.h"

#include <algorithm>
#include <cmath>

namespace fold3d::runtime {
namespace {

/// A send that takes longer has waited, unless many in a row do: the shortest is forgotten by so much with each.
constexpr double kForgets = 1.02;

}  // namespace

void LinkRate::sent(std::size_t bytes, std::int64_t ns) {
  if (bytes == 0 || ns <= 0) return;
  const double measured = static_cast<double>(ns) / static_cast<double>(bytes);
  const std::lock_guard lock(mutex_);
  ns_per_byte_ = ns_per_byte_ > 0 ? std::min(measured, kForgets * ns_per_byte_) : measured;
}

std::optional<std::int64_t> LinkRate::ns_of(std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  if (!(ns_per_byte_ > 0)) return std::nullopt;
  return std::llround(ns_per_byte_ * static_cast<double>(bytes));
}

std::optional<comm::Interval> SendTimes::known() {
  const auto interval = StreamInterval::known();
  if (interval) rate_->sent(bytes_, interval->end_ns - interval->start_ns);
  return interval;
}

std::optional<comm::Interval> ReceiveTimes::known() {
  auto interval = StreamInterval::known();
  if (!interval) return std::nullopt;
  if (const auto travels = rate_->ns_of(bytes_)) {
    interval->start_ns = std::max(interval->start_ns, interval->end_ns - *travels);
  }
  return interval;
}

}  // namespace fold3d::runtime
