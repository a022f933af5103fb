#include "core/dp_sync.h"

#include <algorithm>
#include <bit>

namespace fold3d::core {

DpSyncLanes::DpSyncLanes(const Shape& shape, const ClusterModel& model, int replicas, EventQueue& events,
                         Network& network)
    : shape_(shape), model_(model), replicas_(replicas), events_(events), network_(network) {
  stages_.resize(static_cast<std::size_t>(shape.pp));
  for (int chunk = 0; chunk < shape.num_chunks(); ++chunk) {
    first_bucket_.push_back(static_cast<int>(buckets_.size()));
    const int layers = model.layers[static_cast<std::size_t>(chunk)];
    const std::int64_t bytes = model.gradient_bytes[static_cast<std::size_t>(chunk)];
    const int size = model.layers_per_bucket == 0 ? layers : model.layers_per_bucket;
    for (int first = 0; first < layers; first += size) {
      const int end = std::min(layers, first + size);
      buckets_.push_back({chunk, first, end, bytes * end / layers - bytes * first / layers});
      ++stage_at(shape.stage_of(chunk)).buckets;
    }
  }
  first_bucket_.push_back(static_cast<int>(buckets_.size()));
  produced_.assign(buckets_.size(), 0);
  gathered_.assign(buckets_.size(), 0);
  // One number up a tree over all ranks and down again.
  const auto ranks = static_cast<unsigned>(model.dp * shape.pp);
  vote_ns_ = 2 * model.hop_latency_ns * static_cast<int>(std::bit_width(ranks - 1));
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
  if (stage.reduced == stage.buckets) stage.reduced = stage.early = 0;  // the first of a new step
  stage.reduce.waiting.push_back(bucket);
  start_next(now, stage_of(bucket), false);
}

/// Starts the lane's next collective if the lane is free. The next one follows as soon as the last byte of its
/// predecessor has left: nobody waits for a latency in between.
void DpSyncLanes::start_next(std::int64_t now, int stage_number, bool gather) {
  Stage& stage = stage_at(stage_number);
  Lane& lane = gather ? stage.gather : stage.reduce;
  if (lane.active >= 0 || lane.waiting.empty()) return;
  // Gathers: the one that is needed first by the next forward; numbers are in the order of the forward.
  const auto next = gather ? std::min_element(lane.waiting.begin(), lane.waiting.end()) : lane.waiting.begin();
  if (gather && stage.reduced < stage.buckets) {
    const bool is_limited = model_.dp_sync == DpSync::kEarly || model_.dp_sync == DpSync::kUnvoted;
    if (is_limited && model_.early_gathers >= 0 && stage.early >= model_.early_gathers) return;
    ++stage.early;
    ++early_gathers_;
  }
  const int bucket = *next;
  lane.waiting.erase(next);

  const auto collective = static_cast<int>(collectives_.size());
  collectives_.push_back({bucket, gather, replicas_});
  lane.active = collective;
  const std::int64_t whole = buckets_[static_cast<std::size_t>(bucket)].bytes * (model_.dp - 1);
  // Both halves together are exactly the bytes of an all-reduce, whatever the rounding.
  const std::int64_t half = whole / model_.dp;
  const std::int64_t bytes = gather ? 2 * whole / model_.dp - half : half;
  if (bytes == 0) {
    lane.active = -1;
    events_.push(now, Event::Type::kCollectiveDone, collective);
    start_next(now, stage_number, gather);
    return;
  }
  int local = 0;
  for (int replica = 0; replica < replicas_; ++replica) {
    const int rank = replica * shape_.pp + stage_number;
    const int from = model_.host_of(rank);
    const int to = model_.host_of((replica + 1) % replicas_ * shape_.pp + stage_number);
    // Within a host the card is not used; but the last hop leads to the next block of replicas, if there is one.
    const bool leaves_block = replica + 1 == replicas_ && replicas_ < model_.dp;
    if (from == to && !leaves_block) {
      ++local;
    } else {
      flows_.push_back({collective, rank});
      network_.start_flow(now, from, to, bytes, gather ? 1 : 0, static_cast<int>(flows_.size()) - 1);
    }
  }
  for (; local > 0; --local) one_sent(now, collective);
}

DpSyncLanes::FlowInfo DpSyncLanes::flow_info(int token) const {
  const Flow& flow = flows_[static_cast<std::size_t>(token)];
  const Collective& collective = collectives_[static_cast<std::size_t>(flow.collective)];
  return {flow.rank, buckets_[static_cast<std::size_t>(collective.bucket)].chunk, collective.gather};
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
  if (event.type == Event::Type::kVoted) {
    ++voted_;
    if (model_.dp_sync == DpSync::kZero1) {
      for (int bucket = 0; bucket < static_cast<int>(buckets_.size()); ++bucket) release_gather(event.time, bucket);
    }
    return true;
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
  ++stage_at(stage_of(bucket)).reduced;
  if (model_.dp_sync != DpSync::kZero1) release_gather(now, bucket);
  if (++reduced_ == static_cast<int>(buckets_.size())) {
    reduced_ = 0;
    events_.push(now + vote_ns_, Event::Type::kVoted);
  }
}

void DpSyncLanes::release_gather(std::int64_t now, int bucket) {
  stage_at(stage_of(bucket)).gather.waiting.push_back(bucket);
  start_next(now, stage_of(bucket), true);
}

bool DpSyncLanes::is_open(int bucket, int steps) const {
  const Stage& stage = stages_[static_cast<std::size_t>(stage_of(bucket))];
  switch (model_.dp_sync) {
    case DpSync::kZero1:
    case DpSync::kUnvoted:
      return gathered_[static_cast<std::size_t>(bucket)] >= steps;
    case DpSync::kEarly:
      return voted_ >= steps && gathered_[static_cast<std::size_t>(bucket)] >= steps;
    case DpSync::kBlocking:
    case DpSync::kSerial:
      return voted_ >= steps && stage.gathered >= steps * stage.buckets;
  }
  return true;
}

}  // namespace fold3d::core
