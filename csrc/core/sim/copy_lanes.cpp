#include "core/sim/copy_lanes.h"

#include <algorithm>

#include "core/ir/action_kinds.h"
#include "core/ir/stash.h"

namespace fold3d::core {

CopyLanes::CopyLanes(const Shape& shape, const ClusterModel& model) : shape_(shape), model_(model) {
  for (auto& each : moved_) each.resize(static_cast<std::size_t>(shape.segments * shape.micro_batches));
}

CopyLanes::Moved& CopyLanes::moved(const Action& copy) {
  const auto number = static_cast<std::size_t>(copy.chunk / shape_.pp * shape_.micro_batches + copy.micro_batch);
  const int neighbour = about(copy.kind).neighbour;
  return moved_.at(neighbour == 0 ? 0 : neighbour < 0 ? 1 : 2)[number];
}

std::int64_t CopyLanes::take(const Action& prefetch) {
  Moved& what = moved(prefetch);
  what.comes = false;
  return what.back;
}

std::int64_t CopyLanes::begin(std::int64_t now, int rank, const Action& action, std::vector<SimulatedSpan>* spans) {
  const bool out = is_offload(action.kind);
  const int neighbour = about(action.kind).neighbour;
  Moved& what = moved(action);
  const std::int64_t bytes =
      neighbour == 0 ? model_.stash_bytes[static_cast<std::size_t>(action.chunk)]
                     : model_.activation_bytes[static_cast<std::size_t>(action.chunk + std::min(neighbour, 0))];
  std::deque<std::int64_t>& leaving = neighbour == 0 ? stashes_leaving_ : borders_leaving_;
  if (out) {
    while (leaving.size() >= static_cast<std::size_t>(kOffloadsUnderWay)) {
      now = std::max(now, leaving.front());
      leaving.pop_front();
    }
  } else {
    now = std::max(now, what.left);
    what.comes = true;
  }
  std::int64_t& mine = out ? out_free_ : in_free_;
  const std::int64_t other = model_.copies_share ? std::max(out_free_, in_free_) : mine;
  const std::int64_t start = std::max(now, other);
  const std::int64_t end = start + static_cast<std::int64_t>(1e9 * static_cast<double>(bytes) / model_.copy_bandwidth);
  mine = end;
  (out ? what.left : what.back) = end;
  if (out) leaving.push_back(end);
  const auto lane = out ? SimulatedSpan::Lane::kOffload : SimulatedSpan::Lane::kPrefetch;
  if (spans != nullptr) spans->push_back({rank, lane, action, start, end, bytes});
  return now;
}

}  // namespace fold3d::core
