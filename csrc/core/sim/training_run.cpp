#include "core/sim/training_run.h"

#include <algorithm>
#include <stdexcept>

#include "core/ir/action_kinds.h"
#include "core/ir/deps.h"

namespace fold3d::core {
namespace {

int number_of_hosts(const ClusterModel& model, int ranks) {
  int hosts = 0;
  for (int rank = 0; rank < ranks; ++rank) hosts = std::max(hosts, model.host_of(rank) + 1);
  return hosts;
}

constexpr std::int64_t kLeastToll = 1000;  // nanoseconds

std::size_t at(int index) { return static_cast<std::size_t>(index); }

}  // namespace

TrainingRun::TrainingRun(const SimulatedProgram& program, const ClusterModel& model, const Parts& parts,
                         const SimulationOptions& options)
    : program_(program),
      model_(model),
      parts_(parts),
      options_(options),
      replicas_(model.distinct_replicas(program.shape.pp)),
      network_(number_of_hosts(model, replicas_ * program.shape.pp),
               {model.bandwidth, model.slice_bytes, model.preempt, model.rule}, events_),
      dp_sync_(program.shape, model, replicas_, program.flushes, events_, network_),
      ranks_(at(replicas_ * program.shape.pp)),
      arrivals_(at(replicas_) * program.nodes.size(), 0),
      messages_for_(arrivals_.size(), 0),
      finished_(at(options.max_steps), 0),
      last_step_(options.max_steps - 1),
      message_bytes_(ranks_.size(), 0),
      dp_bytes_(ranks_.size(), 0) {
  const int hosts = number_of_hosts(model, replicas_ * program.shape.pp);
  ranks_of_host_.assign(at(hosts), 0);
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) ++ranks_of_host_[at(model.host_of(rank))];
  card_sent_.assign(at(hosts), 0);
  card_received_.assign(at(hosts), 0);
  if (parts_.copies && !model.stash_bytes.empty()) {
    copies_ = std::vector<CopyLanes>(ranks_.size(), CopyLanes(program.shape, model));
  }
}

void TrainingRun::run() {
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) try_start(0, rank);
  while (!events_.empty()) dispatch(events_.pop());
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
    if (ranks_[at(rank)].step <= last_step_ && !program_.ranks[at(stage_of(rank))].empty()) {
      throw std::invalid_argument("the schedule stops: " + to_string(current(rank).action) + " on rank " +
                                  std::to_string(rank) + " waits for ever; validate() tells what is wrong");
    }
  }
}

void TrainingRun::dispatch(const Event& event) {
  switch (event.type) {
    case Event::Type::kComputed:
      return computed(event.time, event.a);
    case Event::Type::kCopied:
      return try_start(event.time, event.a);
    case Event::Type::kProduced:
      return dp_sync_.produced(event.time, event.b);
    case Event::Type::kArrived:
      return arrived(event.time, event.a, event.b, /*through=*/true);
    case Event::Type::kMessageSent:
    case Event::Type::kBurstSent:
    case Event::Type::kNetworkWake: {
      Network::Sent what;
      if (network_.handle(event, what)) sent(what);
      return network_.start_what_can(event.time);
    }
    case Event::Type::kCollectiveStart:
    case Event::Type::kCollectiveDone:
    case Event::Type::kNormKnown:
    case Event::Type::kUpdated:
      if (!dp_sync_.handle(event)) return;
      for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) try_start(event.time, rank);
  }
}

const SimulatedProgram::Node& TrainingRun::current(int rank) const {
  return program_.nodes[at(program_.ranks[at(stage_of(rank))][ranks_[at(rank)].next])];
}

int& TrainingRun::arrivals(int rank, int node) {
  return arrivals_[at(rank / program_.shape.pp) * program_.nodes.size() + at(node)];
}

int& TrainingRun::messages_for(int rank, int node) {
  return messages_for_[at(rank / program_.shape.pp) * program_.nodes.size() + at(node)];
}

/// Starts the rank's next action, or goes on with a forward that waited for DP.sync, if nothing is missing.
void TrainingRun::try_start(std::int64_t now, int rank_number) {
  Rank& rank = ranks_[at(rank_number)];
  const auto& list = program_.ranks[at(stage_of(rank_number))];
  if (rank.busy || rank.step > last_step_ || list.empty()) return;
  while (rank.step == 0 && current(rank_number).step_before) ++rank.next;  // there is none
  if (rank.bucket >= 0) return start_buckets(now, rank_number);
  const SimulatedProgram::Node& node = current(rank_number);
  // A step's arrivals are complete before those of the next one begin, so counting them all is enough.
  if (!copies_.empty() && !rank.came) come_to_copies(now, rank_number);
  const int steps = rank.step + (node.step_before ? 0 : 1);  // that the node has been in, when this is over
  if (rank.ready > now || arrivals(rank_number, list[rank.next]) < steps * node.waits) return;
  if (!copies_.empty() && waits_for_copies(now, rank_number)) return;
  std::int64_t duration = duration_of(node);
  if (node.first_forward && awaited(rank) > 0) {
    const SimulatedBuckets& buckets = dp_sync_.buckets();
    const int chunk = node.action.chunk;
    if (!parts_.dp_sync) {
      duration += update_of(chunk);
    } else if (buckets.first(chunk) < buckets.end(chunk)) {
      rank.bucket = buckets.first(chunk);
      return start_buckets(now, rank_number);
    }
  }
  if (parts_.dp_sync && node.last_backward) gradients(now, rank_number, node, duration);
  compute(now, rank_number, duration);
}

/// The copies that the rank comes to before its next action. What a message has not brought yet is copied when it is
/// waited for.
void TrainingRun::come_to_copies(std::int64_t now, int rank_number) {
  Rank& rank = ranks_[at(rank_number)];
  rank.came = true;
  rank.took = false;
  rank.ready = now;
  for (const SimulatedProgram::Copy& copy : current(rank_number).copies) {
    if (copy.user >= 0 && messages_for(rank_number, copy.user) <= rank.step) continue;
    rank.ready =
        copies_[at(rank_number)].begin(rank.ready, rank_number, copy.action, options_.spans ? &spans_ : nullptr);
  }
  if (rank.ready > now) events_.push(rank.ready, Event::Type::kCopied, rank_number);
}

/// Whether what the rank's next action needs of the pool is still on its way; the action is tried again then.
bool TrainingRun::waits_for_copies(std::int64_t now, int rank_number) {
  Rank& rank = ranks_[at(rank_number)];
  if (rank.took) return false;
  rank.took = true;
  CopyLanes& lanes = copies_[at(rank_number)];
  for (const Action& prefetch : current(rank_number).waited) {
    if (!lanes.is_coming(prefetch)) lanes.begin(now, rank_number, prefetch, options_.spans ? &spans_ : nullptr);
    rank.ready = std::max(rank.ready, lanes.take(prefetch));
  }
  if (rank.ready <= now) return false;
  events_.push(rank.ready, Event::Type::kCopied, rank_number);
  return true;
}

/// Computes as many layers of a chunk's first forward as are up to date, after what is left of their update.
void TrainingRun::start_buckets(std::int64_t now, int rank_number) {
  Rank& rank = ranks_[at(rank_number)];
  const SimulatedBuckets& buckets = dp_sync_.buckets();
  const int chunk = current(rank_number).action.chunk;
  const int first = rank.bucket;
  if (!dp_sync_.is_updated(stage_of(rank_number), awaited(rank))) return;
  std::int64_t update = 0;
  while (rank.bucket < buckets.end(chunk) && dp_sync_.is_open(rank.bucket, awaited(rank))) {
    update += buckets[rank.bucket].zero1 ? 0 : buckets[rank.bucket].update_ns;
    ++rank.bucket;
  }
  if (rank.bucket == first) return;
  const std::int64_t begin = first == buckets.first(chunk) ? -model_.action_ns : buckets[first].forward_begin;
  const bool ends = rank.bucket == buckets.end(chunk);
  const std::int64_t head = ends && current(rank_number).turns ? model_.head_ns : 0;
  compute(now, rank_number, update + buckets[rank.bucket - 1].forward_end - begin + head);
}

void TrainingRun::compute(std::int64_t now, int rank, std::int64_t duration) {
  ranks_[at(rank)].busy = true;
  if (model_.toll_ns > 0) ranks_[at(rank)].charged = network_.sent_until(model_.host_of(rank), now);
  events_.push(now + duration, Event::Type::kComputed, rank);
  if (options_.spans) {
    spans_.push_back({rank, SimulatedSpan::Lane::kCompute, current(rank).action, now, now + duration, 0});
  }
}

/// Announces when the chunk's buckets will be complete: the backward goes through its layers from last to first; where
/// the head's has run before, from the last block.
void TrainingRun::gradients(std::int64_t start, int rank, const SimulatedProgram::Node& node, std::int64_t duration) {
  if (model_.dp_sync == DpSync::kSerial) return;  // end_of_program
  const SimulatedBuckets& buckets = dp_sync_.buckets();
  const int chunk = node.action.chunk;
  const std::int64_t computing = duration - model_.action_ns;
  const std::int64_t head = node.turns ? model_.head_ns : 0;
  const std::int64_t body = model_.backward_ns[at(chunk)] - head;
  for (int bucket = buckets.end(chunk) - 1; bucket >= buckets.first(chunk); --bucket) {
    std::int64_t after = 0;
    if (head == 0) {
      after = buckets.produced_after(bucket, computing);
    } else if (program_.head_is_early && is_of_head(bucket)) {
      continue;  // head_gradients
    } else if (body > 0) {
      const std::int64_t part = std::max<std::int64_t>(0, buckets.produced_after(bucket, body + head) - head);
      after = static_cast<std::int64_t>(static_cast<long double>(computing) * static_cast<long double>(part) /
                                        static_cast<long double>(body));
    }
    events_.push(start + model_.action_ns + after, Event::Type::kProduced, rank, bucket);
  }
}

/// Buckets of nothing but the head are complete with its last backward, which was a part of a forward.
void TrainingRun::head_gradients(std::int64_t now) {
  if (model_.dp_sync == DpSync::kSerial) return;
  const SimulatedBuckets& buckets = dp_sync_.buckets();
  const int chunk = program_.shape.num_chunks() - 1;
  for (int bucket = buckets.end(chunk) - 1; bucket >= buckets.first(chunk); --bucket) {
    if (is_of_head(bucket)) dp_sync_.produced(now, bucket);
  }
}

bool TrainingRun::is_of_head(int bucket) const {
  const std::int64_t backward = model_.backward_ns.back();
  const std::int64_t rounding = backward / 100'000;  // times come as seconds
  return model_.head_ns > 0 && dp_sync_.buckets().produced_after(bucket, backward) <= model_.head_ns + rounding;
}

/// By how much what the rank's card has sent while it computed has delayed that.
std::int64_t TrainingRun::toll_until(std::int64_t now, int rank) {
  const int host = model_.host_of(rank);
  const double bytes = network_.sent_until(host, now) - ranks_[at(rank)].charged;
  const auto toll = static_cast<std::int64_t>(model_.toll_ns * bytes / ranks_of_host_[at(host)]);
  return toll < kLeastToll ? 0 : toll;
}

void TrainingRun::computed(std::int64_t now, int rank_number) {
  Rank& rank = ranks_[at(rank_number)];
  if (model_.toll_ns > 0) {  // sends go on while it is delayed, which delays it again, by less
    if (const std::int64_t toll = toll_until(now, rank_number); toll > 0) return compute(now, rank_number, toll);
  }
  rank.busy = false;
  const SimulatedProgram::Node& node = current(rank_number);
  if (rank.bucket >= 0) {
    if (rank.bucket < dp_sync_.buckets().end(node.action.chunk)) return start_buckets(now, rank_number);
    rank.bucket = -1;
  }
  const int number = program_.ranks[at(stage_of(rank_number))][rank.next];
  if (parts_.dp_sync && node.last_of_head) head_gradients(now);
  rank.came = false;
  if (++rank.next == program_.ranks[at(stage_of(rank_number))].size()) end_of_program(now, rank_number);
  for (const SimulatedProgram::Edge& edge : node.feeds) feed(now, rank_number, edge, number);
  try_start(now, rank_number);
}

void TrainingRun::end_of_program(std::int64_t now, int rank_number) {
  Rank& rank = ranks_[at(rank_number)];
  const int step = rank.step;
  rank.next = 0;
  ++rank.step;
  rank.spans_of_last = rank.spans_of_this;
  rank.spans_of_this = spans_.size();
  if (parts_.dp_sync && model_.dp_sync == DpSync::kSerial) {
    for (int segment = program_.shape.segments - 1; segment >= 0; --segment) {
      const int chunk = program_.shape.chunk_of(segment, stage_of(rank_number));
      for (int bucket = dp_sync_.buckets().end(chunk) - 1; bucket >= dp_sync_.buckets().first(chunk); --bucket) {
        dp_sync_.produced(now, bucket);
      }
    }
  }
  if (++finished_[at(step)] < static_cast<int>(ranks_.size())) return;
  ends_.push_back(now);
  if (parts_.dp_sync) dp_sync_.all_finished(now);
  // The first steps meet no DP.sync of a step before them, so they are no samples of the steady state.
  const std::size_t free =
      (parts_.dp_sync ? 1 + static_cast<std::size_t>(model_.gradient_delay) : 0) + (program_.flushes ? 0 : 1);
  if (ends_.size() >= free + window() + 1 && length_until(ends_.size() - 1) == length_until(ends_.size() - 2)) {
    steady_ = true;
    // A rank may already be one step ahead; that step is then completed by all.
    bool ahead = false;
    for (const Rank& other : ranks_) ahead = ahead || (other.step == step + 1 && (other.next > 0 || other.busy));
    last_step_ = std::min(last_step_, ahead ? step + 1 : step);
  }
}

void TrainingRun::feed(std::int64_t now, int from, const SimulatedProgram::Edge& edge, int from_node) {
  const int to = from - stage_of(from) + edge.stage;
  if (!edge.through || !parts_.messages) return arrived(now, to, edge.node, edge.through);
  // Chunk c hands activations to c + 1 and gets their gradient, of the same size, back.
  const std::int64_t bytes = model_.activation_bytes[at(edge.border)];
  if (bytes == 0 || !uses_card(model_.hosts, from, to)) {
    events_.push(now + model_.latency_ns, Event::Type::kArrived, to, edge.node);
    return;
  }
  messages_.push_back({from, to, from_node, edge.node});
  const auto& links = edge.forward ? model_.forward_links : model_.backward_links;
  const double rate = links.empty() ? 0 : links[at(edge.border)];
  const int token = static_cast<int>(messages_.size()) - 1;
  network_.send_message(now, model_.host_of(from), model_.host_of(to), bytes, token, rate);
}

void TrainingRun::arrived(std::int64_t now, int rank, int node, bool through) {
  ++arrivals(rank, node);
  if (through) ++messages_for(rank, node);
  try_start(now, rank);
}

void TrainingRun::sent(const Network::Sent& what) {
  card_sent_[at(what.from)] += what.bytes;
  card_received_[at(what.to)] += what.bytes;
  SimulatedSpan span{0, SimulatedSpan::Lane::kCompute, {}, what.start, what.end, what.bytes};
  if (what.message) {
    const Message& message = messages_[at(what.token)];
    const Action& source = program_.nodes[at(message.from_node)].action;
    span.rank = message.from_rank;
    span.action = *send_after(program_.shape, source);
    const bool forward = span.action.kind == Kind::kSendForward;
    span.lane = forward ? SimulatedSpan::Lane::kSendForward : SimulatedSpan::Lane::kSendBackward;
    message_bytes_[at(span.rank)] += what.bytes;
    events_.push(what.end + model_.latency_ns, Event::Type::kArrived, message.to_rank, message.to_node);
  } else {
    const DpSyncLanes::FlowInfo flow = dp_sync_.flow_info(what.token);
    span.rank = flow.rank;
    span.lane = flow.gather ? SimulatedSpan::Lane::kGather : SimulatedSpan::Lane::kReduceScatter;
    span.action = {flow.chunk, Kind::kReduce, -1};
    dp_bytes_[at(span.rank)] += what.bytes;
    if (what.finished) dp_sync_.flow_sent(what.end, what.token);
  }
  if (options_.spans && options_.sends) spans_.push_back(span);
}

/// Time of an action, of its chunk's whole forward and backward.
std::int64_t TrainingRun::share_of(const Action& action, std::int64_t forward, std::int64_t backward) const {
  const bool is_half = action.kind == Kind::kBackwardInput || action.kind == Kind::kBackwardWeight;
  if (!model_.halves && is_half && action.chunk > 0) return action.kind == Kind::kBackwardInput ? backward : 0;
  return time_of(action.kind, action.chunk, forward, backward);
}

std::int64_t TrainingRun::duration_of(const SimulatedProgram::Node& node) const {
  const Action& action = node.action;
  const std::size_t chunk = at(action.chunk);
  const std::int64_t head = node.turns ? model_.head_ns : 0;
  const std::int64_t time = share_of(action, model_.forward_ns[chunk], model_.backward_ns[chunk] - head) +
                            (action.kind == Kind::kForward ? head : 0);
  // Sums of the first forward were kept: computing again waits for none.
  const bool again = action.kind == Kind::kRecompute && !model_.forward_tp_ns.empty();
  return model_.action_ns + time - (again ? model_.forward_tp_ns[chunk] : 0);
}

std::int64_t TrainingRun::compute_ns(int stage) const {
  std::int64_t sum = 0;
  for (const int node : program_.ranks[at(stage)]) sum += duration_of(program_.nodes[at(node)]);
  const Shape& shape = program_.shape;
  for (int segment = 0; segment < shape.segments; ++segment) sum += update_of(shape.chunk_of(segment, stage));
  return sum;
}

std::int64_t TrainingRun::exposed_tp_ns(int stage) const {
  const auto of = [](const std::vector<std::int64_t>& times, int chunk) {
    return times.empty() ? 0 : times[at(chunk)];
  };
  std::int64_t sum = 0;
  for (const int node : program_.ranks[at(stage)]) {
    const Action& action = program_.nodes[at(node)].action;
    if (action.kind == Kind::kRecompute) continue;
    sum += share_of(action, of(model_.forward_tp_ns, action.chunk), of(model_.backward_tp_ns, action.chunk));
  }
  return sum;
}

/// What the optimizer computes of the chunk in one step, after the norm or before the first forward.
std::int64_t TrainingRun::update_of(int chunk) const {
  const SimulatedBuckets& buckets = dp_sync_.buckets();
  std::int64_t sum = 0;
  for (int bucket = buckets.first(chunk); bucket < buckets.end(chunk); ++bucket) {
    sum += buckets[bucket].zero1 ? buckets.share_of_update(bucket) : buckets[bucket].update_ns;
  }
  return sum;
}

/// Steps that are looked at together: where gradients are late, what one step leaves to send may make every second one
/// longer.
std::size_t TrainingRun::window() const {
  return parts_.dp_sync ? 1 + static_cast<std::size_t>(model_.gradient_delay) : 1;
}

std::int64_t TrainingRun::length_until(std::size_t step) const {
  return ends_[step] - (step < window() ? 0 : ends_[step - window()]);
}

std::int64_t TrainingRun::step_ns() const {
  const auto steps = static_cast<std::int64_t>(std::min(ends_.size(), window()));
  return length_until(ends_.size() - 1) / steps;
}

std::int64_t TrainingRun::busiest_card_bytes() const {
  return std::max(*std::max_element(card_sent_.begin(), card_sent_.end()),
                  *std::max_element(card_received_.begin(), card_received_.end())) /
         steps();
}

std::vector<SimulatedSpan> TrainingRun::take_spans() {
  const std::int64_t start = start_of_last_step();
  std::vector<SimulatedSpan> seen;
  for (std::size_t k = 0; k < spans_.size(); ++k) {
    SimulatedSpan span = spans_[k];
    // A rank that has computed some of the step before all others had ended the one before is at its beginning then.
    const bool is_early = span.lane == SimulatedSpan::Lane::kCompute && k >= ranks_[at(span.rank)].spans_of_last;
    if ((span.end_ns <= start && !is_early) || span.start_ns >= ends_.back()) continue;
    span.start_ns = std::max(span.start_ns, start) - start;
    span.end_ns = std::max(std::min(span.end_ns, ends_.back()), start) - start;
    seen.push_back(span);
  }
  std::stable_sort(seen.begin(), seen.end(),
                   [](const SimulatedSpan& x, const SimulatedSpan& y) { return x.start_ns < y.start_ns; });
  return seen;
}

}  // namespace fold3d::core
