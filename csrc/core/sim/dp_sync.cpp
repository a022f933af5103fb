#include "core/sim/dp_sync.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace fold3d::core {

DpSyncLanes::DpSyncLanes(const Shape& shape, const ClusterModel& model, int replicas, bool flushes, EventQueue& events,
                         Network& network)
    : shape_(shape),
      model_(model),
      replicas_(replicas),
      flushes_(flushes),
      events_(events),
      network_(network),
      buckets_(shape, model),
      produced_(static_cast<std::size_t>(buckets_.size()), 0),
      gathered_(static_cast<std::size_t>(buckets_.size()), 0),
      summed_(static_cast<std::size_t>(buckets_.size()), 0),
      stages_(static_cast<std::size_t>(shape.pp)) {
  for (int bucket = 0; bucket < buckets_.size(); ++bucket) {
    stage_at(stage_of(bucket)).early_buckets += buckets_[bucket].early ? 1 : 0;
  }
  if (!model.gather_order.empty()) {
    if (model.gather_order.size() != stages_.size()) {
      throw std::invalid_argument("cluster model: gather_order has " + std::to_string(model.gather_order.size()) +
                                  " lists; it must have one for each of the " + std::to_string(shape.pp) + " stages");
    }
    for (int stage = 0; stage < shape.pp; ++stage) plan(stage, model.gather_order[static_cast<std::size_t>(stage)]);
  }
  // One number up a tree over all ranks and down again.
  const auto ranks = static_cast<unsigned>(model.dp * shape.pp);
  vote_ns_ = 2 * model.hop_latency_ns * static_cast<int>(std::bit_width(ranks - 1));
}

void DpSyncLanes::plan(int stage, const std::vector<int>& order) {
  const std::vector<int>& mine = buckets_.of_stage(stage);
  std::vector<bool> seen(mine.size(), false);
  for (const int local : order) {
    const bool known = local >= 0 && local < static_cast<int>(mine.size());
    if (!known || seen[static_cast<std::size_t>(local)] || !buckets_[mine[static_cast<std::size_t>(local)]].early) {
      throw std::invalid_argument("cluster model: gather_order[" + std::to_string(stage) + "] has " +
                                  std::to_string(local) + ", which is no early bucket of the stage, or there twice");
    }
    seen[static_cast<std::size_t>(local)] = true;
    stage_at(stage).order.push_back(mine[static_cast<std::size_t>(local)]);
  }
  if (static_cast<int>(order.size()) != stage_at(stage).early_buckets) {
    throw std::invalid_argument("cluster model: gather_order[" + std::to_string(stage) + "] has " +
                                std::to_string(order.size()) + " numbers; it must have one for each of the stage's " +
                                std::to_string(stage_at(stage).early_buckets) + " early buckets");
  }
}

DpSyncLanes::Lane& DpSyncLanes::lane_of(const Collective& collective) {
  Stage& stage = stage_at(stage_of(collective.bucket));
  return collective.gather ? stage.gather : stage.reduce;
}

void DpSyncLanes::produced(std::int64_t now, int bucket) {
  int& ranks = produced_[static_cast<std::size_t>(bucket)];
  if (++ranks < replicas_) return;
  ranks = 0;
  Stage& stage = stage_at(stage_of(bucket));
  if (stage.reduced == static_cast<int>(buckets_.of_stage(stage_of(bucket)).size())) {  // the first of a new step
    stage.reduced = stage.early = 0;
    stage.begun = 0;
  }
  stage.reduce.waiting.push_back({bucket, finished_});
  start_next(now, stage_of(bucket), false);
}

/// The gather that goes next, or the end if none may yet.
std::vector<DpSyncLanes::Waiting>::iterator DpSyncLanes::next_gather(Stage& stage) {
  auto& waiting = stage.gather.waiting;
  if (delay() == 0 && stage.begun < stage.order.size()) {
    return std::find_if(waiting.begin(), waiting.end(),
                        [&stage](const Waiting& gather) { return gather.bucket == stage.order[stage.begun]; });
  }
  return std::min_element(waiting.begin(), waiting.end(), [&](const Waiting& x, const Waiting& y) {
    const auto key = [&](const Waiting& gather) {
      return std::tuple(gather.step, buckets_[gather.bucket].zero1, place_of(stage, gather));
    };
    return key(x) < key(y);
  });
}

/// Without a plan the one goes first that is needed first by the next forward: numbers are in the order of the forward.
int DpSyncLanes::place_of(const Stage& stage, const Waiting& gather) const {
  const auto planned = std::find(stage.order.begin(), stage.order.end(), gather.bucket);
  return planned == stage.order.end() ? gather.bucket : static_cast<int>(planned - stage.order.begin());
}

/// Starts the lane's next collective if the lane is free. The next one follows as soon as the last byte of its
/// predecessor has left: nobody waits for a latency in between.
void DpSyncLanes::start_next(std::int64_t now, int stage_number, bool gather) {
  Stage& stage = stage_at(stage_number);
  Lane& lane = gather ? stage.gather : stage.reduce;
  if (lane.active >= 0 || lane.waiting.empty()) return;
  const auto next = gather ? next_gather(stage) : lane.waiting.begin();
  if (next == lane.waiting.end()) return;
  const auto [bucket, step] = *next;
  if (gather && delay() == 0 && stage.reduced < static_cast<int>(buckets_.of_stage(stage_number).size())) {
    if (buckets_[bucket].early && model_.early_gathers >= 0 && stage.early >= model_.early_gathers) return;
    ++stage.early;
    ++early_gathers_;
  }
  lane.waiting.erase(next);
  if (gather && buckets_[bucket].early) {
    ++stage.begun;
    stage.log.push_back(bucket);
  }

  const auto collective = static_cast<int>(collectives_.size());
  const std::int64_t whole = buckets_[bucket].bytes * (model_.dp - 1);
  // Both halves together are exactly the bytes of an all-reduce, whatever the rounding.
  const std::int64_t half = whole / model_.dp;
  collectives_.push_back({bucket, gather, replicas_, gather ? 2 * whole / model_.dp - half : half});
  if (collectives_.back().bytes == 0) {
    events_.push(now, Event::Type::kCollectiveDone, collective);
    return start_next(now, stage_number, gather);
  }
  lane.active = collective;
  if (model_.bucket_ns == 0) return start_flows(now, collective);
  events_.push(now + model_.bucket_ns, Event::Type::kCollectiveStart, collective);
}

void DpSyncLanes::start_flows(std::int64_t now, int number) {
  const Collective collective = collectives_[static_cast<std::size_t>(number)];
  const int stage_number = stage_of(collective.bucket);
  int local = 0;
  for (int replica = 0; replica < replicas_; ++replica) {
    const int rank = replica * shape_.pp + stage_number;
    const int next = (replica + 1) % replicas_ * shape_.pp + stage_number;
    // The last hop leads to the next block of replicas, on other hosts, if there is one.
    const bool leaves_block = replica + 1 == replicas_ && replicas_ < model_.dp;
    if (!uses_card(model_.hosts, rank, next) && !leaves_block) {
      ++local;
    } else {
      flows_.push_back({number, rank});
      network_.start_flow(now, model_.host_of(rank), model_.host_of(next), collective.bytes,
                          collective.gather == (delay() == 0) ? 1 : 0, static_cast<int>(flows_.size()) - 1);
    }
  }
  for (; local > 0; --local) one_sent(now, number);
}

DpSyncLanes::FlowInfo DpSyncLanes::flow_info(int token) const {
  const Flow& flow = flows_[static_cast<std::size_t>(token)];
  const Collective& collective = collectives_[static_cast<std::size_t>(flow.collective)];
  return {flow.rank, buckets_[collective.bucket].chunk, collective.gather};
}

void DpSyncLanes::flow_sent(std::int64_t now, int token) {
  one_sent(now, flows_[static_cast<std::size_t>(token)].collective);
}

void DpSyncLanes::one_sent(std::int64_t now, int number) {
  if (--collectives_[static_cast<std::size_t>(number)].flows > 0) return;
  const Collective collective = collectives_[static_cast<std::size_t>(number)];  // a copy: start_next adds more
  events_.push(now + (model_.dp - 1) * model_.hop_latency_ns, Event::Type::kCollectiveDone, number);
  lane_of(collective).active = -1;
  start_next(now, stage_of(collective.bucket), collective.gather);
}

bool DpSyncLanes::handle(const Event& event) {
  switch (event.type) {
    case Event::Type::kCollectiveStart:
      start_flows(event.time, event.a);
      return false;
    case Event::Type::kNormKnown:
      voted(event.time);
      return true;
    case Event::Type::kUpdated:
      if (event.a < 0) {
        ++stage_at(event.b).updated;
        return true;
      }
      release_gather(event.time, event.a, voted_ - 1);
      return false;
    default:
      break;
  }
  const Collective collective = collectives_[static_cast<std::size_t>(event.a)];
  if (!collective.gather) {
    reduced(event.time, collective.bucket);
    return false;
  }
  ++gathered_[static_cast<std::size_t>(collective.bucket)];
  ++stage_at(stage_of(collective.bucket)).gathered;
  return true;
}

void DpSyncLanes::reduced(std::int64_t now, int bucket) {
  Stage& stage = stage_at(stage_of(bucket));
  ++stage.reduced;
  ++stage.summed;
  const int step = summed_[static_cast<std::size_t>(bucket)]++;
  if (!buckets_[bucket].zero1) {
    if (waits_for_end() && step == finished_) {
      held_.push_back({bucket, step});
    } else {
      release_gather(now, bucket, step);
    }
  }
  ask_norm(now);
}

void DpSyncLanes::all_finished(std::int64_t now) {
  ++finished_;
  ask_norm(now);
  for (const Waiting& gather : std::exchange(held_, {})) release_gather(now, gather.bucket, gather.step);
}

/// The norm of a step is asked for once all of its gradients are summed, and all ranks have come to it.
void DpSyncLanes::ask_norm(std::int64_t now) {
  if (buckets_.size() == 0 || (waits_for_end() && asked_ + delay() >= finished_)) return;
  for (int stage = 0; stage < shape_.pp; ++stage) {
    if (stage_at(stage).summed < (asked_ + 1) * static_cast<int>(buckets_.of_stage(stage).size())) return;
  }
  ++asked_;
  events_.push(now + vote_ns_, Event::Type::kNormKnown);
}

/// Every rank updates its shares of the zero1 buckets, one after the other in forward order; each is gathered as soon
/// as it is updated.
void DpSyncLanes::voted(std::int64_t now) {
  ++voted_;
  for (int stage = 0; stage < shape_.pp; ++stage) {
    std::int64_t time = now;
    for (const int bucket : buckets_.of_stage(stage)) {
      if (!buckets_[bucket].zero1) continue;
      time += buckets_.share_of_update(bucket);
      if (time == now) {
        release_gather(now, bucket, voted_ - 1);
      } else {
        events_.push(time, Event::Type::kUpdated, bucket, stage);
      }
    }
    if (time == now) {
      ++stage_at(stage).updated;
    } else {
      events_.push(time, Event::Type::kUpdated, -1, stage);
    }
  }
}

void DpSyncLanes::release_gather(std::int64_t now, int bucket, int step) {
  stage_at(stage_of(bucket)).gather.waiting.push_back({bucket, step});
  start_next(now, stage_of(bucket), true);
}

bool DpSyncLanes::is_open(int bucket, int steps) const {
  const Stage& stage = stages_[static_cast<std::size_t>(stage_of(bucket))];
  const bool gathered = gathered_[static_cast<std::size_t>(bucket)] >= steps;
  switch (model_.dp_sync) {
    case DpSync::kUnvoted:
      return gathered;
    case DpSync::kZero1:
    case DpSync::kEarly:
      return gathered && voted_ >= steps;
    case DpSync::kBlocking:
    case DpSync::kSerial:
      return voted_ >= steps && stage.gathered >= steps * static_cast<int>(buckets_.of_stage(stage_of(bucket)).size());
  }
  return true;
}

std::vector<std::vector<int>> DpSyncLanes::gather_order() const {
  std::vector<std::vector<int>> orders(stages_.size());
  for (std::size_t stage = 0; stage < stages_.size(); ++stage) {
    // A bucket is reduced again only after its gather, so the last gathers are those of one step.
    const std::vector<int>& log = stages_[stage].log;
    const auto count = std::min(log.size(), static_cast<std::size_t>(stages_[stage].early_buckets));
    for (std::size_t i = log.size() - count; i < log.size(); ++i) orders[stage].push_back(buckets_[log[i]].local);
  }
  return orders;
}

}  // namespace fold3d::core
