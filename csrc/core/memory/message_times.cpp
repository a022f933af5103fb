#include "core/memory/message_times.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "core/ir/action_kinds.h"
#include "core/ir/deps.h"

namespace fold3d::core {
namespace {

std::size_t at(int number) { return static_cast<std::size_t>(number); }

/// A link and its direction: messages of it are sent one after the other.
using Queue = std::tuple<int, int, Kind>;

/// Of the first replica, by stage; parts that follow each other are one.
template <class Wanted>
std::vector<std::vector<ActionTime>> times_of(const TrainingStep& step, const Shape& shape, Wanted wanted) {
  std::vector<std::vector<ActionTime>> times(at(shape.pp));
  std::int64_t origin = 0;
  for (const SimulatedSpan& span : step.spans) origin = std::min(origin, span.start_ns);
  for (const SimulatedSpan& span : step.spans) {
    if (!wanted(span.lane) || span.rank >= shape.pp) continue;
    auto& list = times[at(span.rank)];
    const std::int64_t start = span.start_ns - origin, end = span.end_ns - origin;
    if (!list.empty() && list.back().action == span.action) {
      list.back().end_ns = end;
    } else {
      list.push_back({span.action, start, end});
    }
  }
  return times;
}

}  // namespace

std::vector<std::vector<ActionTime>> compute_times(const TrainingStep& step, const Shape& shape) {
  using Lane = SimulatedSpan::Lane;
  return times_of(step, shape, [](Lane lane) { return lane == Lane::kCompute; });
}

std::vector<std::vector<ActionTime>> copy_times(const TrainingStep& step, const Shape& shape) {
  using Lane = SimulatedSpan::Lane;
  return times_of(step, shape, [](Lane lane) { return lane == Lane::kOffload || lane == Lane::kPrefetch; });
}

std::vector<Message> message_times(const Shape& shape, const std::vector<std::vector<ActionTime>>& times,
                                   int receive_ahead, const std::function<bool(const Action&)>& lands) {
  constexpr std::pair<int, int> kNowhere{-1, -1};
  ActionTable<std::pair<int, int>> places(shape, kNowhere);  // stage, position in its list
  OptionalActions split;
  {
    Schedule ran{shape, {}};
    for (const auto& list : times) {
      auto& actions = ran.ranks.emplace_back();
      for (const ActionTime& time : list) actions.push_back(time.action);
    }
    split = OptionalActions(ran);
  }
  for (int stage = 0; stage < static_cast<int>(times.size()); ++stage) {
    for (int k = 0; k < static_cast<int>(times[at(stage)].size()); ++k) {
      const Action& action = times[at(stage)][at(k)].action;
      if (places.contains(action)) places[action] = {stage, k};
    }
  }
  std::map<Queue, std::vector<Message>> queues;
  for (int stage = 0; stage < static_cast<int>(times.size()); ++stage) {
    for (const ActionTime& time : times[at(stage)]) {
      const auto send = send_after(shape, time.action);
      if (!send) continue;
      const Action recv = other_end(*send);
      const Action taker = recv.kind == Kind::kRecvForward ? Action{recv.chunk, Kind::kForward, recv.micro_batch}
                                                           : split.input_gradient(recv.chunk, recv.micro_batch);
      const auto [to, position] = places[taker];
      if (to < 0) continue;  // a step that was cut short
      Message message{stage, to, time.action, taker, time.end_ns, time.end_ns, time.end_ns, 0};
      message.taken_ns = times[at(to)][at(position)].start_ns;
      queues[{stage, to, send->kind}].push_back(message);
    }
  }
  std::vector<Message> all;
  for (auto& [queue, messages] : queues) {
    std::int64_t before = 0;
    for (std::size_t k = 0; k < messages.size(); ++k) {
      Message& message = messages[k];
      std::int64_t allowed = 0;
      if (k >= at(receive_ahead) && !(lands && lands(message.to))) {
        // The receiver's program comes to a receive when what it computes before is done.
        const auto [to, position] = places[messages[k - at(receive_ahead)].to];
        if (position > 0) allowed = times[at(to)][at(position - 1)].end_ns;
      }
      message.begins_ns = std::max({message.made_ns, allowed, before});
      message.there_ns = before = message.begins_ns;
      message.taken_ns = std::max(message.taken_ns, message.there_ns);
      all.push_back(message);
    }
  }
  return all;
}

}  // namespace fold3d::core
