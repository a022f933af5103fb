// When messages travelled, as far as the device of one end can tell.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "runtime/device/stream_clock.h"

namespace fold3d::runtime {

/// How fast messages go over the link to one neighbour, by those that this rank has sent. Thread-safe.
class LinkRate {
 public:
  void sent(std::size_t bytes, std::int64_t ns);
  /// Of that many bytes; nullopt: nothing was sent yet.
  std::optional<std::int64_t> ns_of(std::size_t bytes) const;

 private:
  mutable std::mutex mutex_;
  double ns_per_byte_ = 0;  // 0: not known
};

/// From when a message could be sent, and its receiver was there as a rule, to when it was.
class SendTimes final : public StreamInterval {
 public:
  SendTimes(comm::Moment start, comm::Moment end, std::size_t bytes, std::shared_ptr<LinkRate> rate)
      : StreamInterval(std::move(start), std::move(end)), bytes_(bytes), rate_(std::move(rate)) {}
  std::optional<comm::Interval> known() override;

 private:
  const std::size_t bytes_;
  const std::shared_ptr<LinkRate> rate_;
};

/// A receive waits for its sender, and the device does not tell that from receiving. So the message is taken to have
/// begun to arrive as long before its end as its bytes take on the same link in the other direction.
class ReceiveTimes final : public StreamInterval {
 public:
  ReceiveTimes(comm::Moment start, comm::Moment end, std::size_t bytes, std::shared_ptr<const LinkRate> rate)
      : StreamInterval(std::move(start), std::move(end)), bytes_(bytes), rate_(std::move(rate)) {}
  std::optional<comm::Interval> known() override;

 private:
  const std::size_t bytes_;
  const std::shared_ptr<const LinkRate> rate_;
};

}  // namespace fold3d::runtime
