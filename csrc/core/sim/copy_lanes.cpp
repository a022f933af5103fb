#include "core/sim/copy_lanes.h"

#include <algorithm>

#include "core/ir/stash.h"

namespace fold3d::core {

CopyLanes::CopyLanes(const Shape& shape, const ClusterModel& model)
    : shape_(shape),
      model_(model),
      left_(static_cast<std::size_t>(shape.segments * shape.micro_batches), 0),
      back_(left_.size(), 0) {}

std::size_t CopyLanes::number_of(const Action& action) const {
  return static_cast<std::size_t>(action.chunk / shape_.pp * shape_.micro_batches + action.micro_batch);
}

std::int64_t CopyLanes::begin(std::int64_t now, int rank, const Action& action, std::vector<SimulatedSpan>* spans) {
  const bool out = action.kind == Kind::kOffload;
  const std::size_t stash = number_of(action);
  const std::int64_t bytes = model_.stash_bytes[static_cast<std::size_t>(action.chunk)];
  if (out) {
    while (leaving_.size() >= static_cast<std::size_t>(kOffloadsUnderWay)) {
      now = std::max(now, leaving_.front());
      leaving_.pop_front();
    }
  } else {
    now = std::max(now, left_[stash]);
  }
  std::int64_t& mine = out ? out_free_ : in_free_;
  const std::int64_t other = model_.copies_share ? std::max(out_free_, in_free_) : mine;
  const std::int64_t start = std::max(now, other);
  const std::int64_t end = start + static_cast<std::int64_t>(1e9 * static_cast<double>(bytes) / model_.copy_bandwidth);
  mine = end;
  (out ? left_ : back_)[stash] = end;
  if (out) leaving_.push_back(end);
  const auto lane = out ? SimulatedSpan::Lane::kOffload : SimulatedSpan::Lane::kPrefetch;
  if (spans != nullptr) spans->push_back({rank, lane, action, start, end, bytes});
  return now;
}

}  // namespace fold3d::core
