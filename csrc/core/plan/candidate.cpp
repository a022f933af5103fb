#include "core/plan/candidate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "core/generators/registry.h"
#include "core/passes/lower.h"
#include "core/passes/repeat.h"

namespace fold3d::core {
namespace {

constexpr std::array<std::string_view, 3> kWayNames = {"early", "zero1", "serial"};
constexpr double kNs = 1e9;
constexpr double kRounding = 1e-6;     // of times that bounds are made of
constexpr double kMostForwards = 1e7;  // of all ranks; a step of hours, and gigabytes of actions

std::size_t at(int number) { return static_cast<std::size_t>(number); }

std::int64_t rounded(double value) { return static_cast<std::int64_t>(std::nearbyint(value)); }
std::int64_t ns(double seconds) { return rounded(kNs * seconds); }

std::vector<std::int64_t> all_ns(const std::vector<double>& seconds) {
  std::vector<std::int64_t> found;
  for (const double one : seconds) found.push_back(ns(one));
  return found;
}

/// Parts of times: rounded by themselves they could be larger.
std::vector<std::int64_t> parts_ns(const std::vector<double>& seconds, const std::vector<std::int64_t>& whole) {
  std::vector<std::int64_t> found = all_ns(seconds);
  for (std::size_t k = 0; k < found.size(); ++k) found[k] = std::min(found[k], whole[k]);
  return found;
}

/// How many bytes of an all-reduce a bucket's sum and gather take, each half of it, one with the other.
std::int64_t sent(std::int64_t bytes, double share, Way way) {
  return rounded(static_cast<double>(bytes) * (way == Way::kZero1 ? (1 + share) / 2 : share));
}

Schedule unchecked(const PlanJob& job, const Order& order, int segments) {
  if (order.given) return *order.given;
  if (static_cast<double>(job.pp) * segments * job.micro_batches > kMostForwards) {
    throw std::invalid_argument("pp=" + std::to_string(job.pp) + " segments=" + std::to_string(segments) +
                                " micro_batches=" + std::to_string(job.micro_batches) +
                                ": more than 1e+07 forwards in one step; lower micro_batches");
  }
  return generate(order.name, {{job.pp, segments, job.micro_batches}, order.group_size, ""});
}

Schedule generated(const PlanJob& job, const Order& order, int segments) {
  Schedule made = unchecked(job, order, segments);
  if (job.pp > 1 && made.shape.style != job.style) {
    throw std::invalid_argument("schedule='" + order.name + "' has its chunks on the stages of style " +
                                to_string(made.shape.style) + ", and the model's are on those of style " +
                                to_string(job.style) + ": name the schedule from the beginning");
  }
  return made;
}

/// Bytes that the optimizer's step needs on the device beside its state.
std::int64_t workspace(const PlanJob& job, const Layout& layout, const Modes& modes, int stage) {
  std::int64_t all = 0, most = 0, largest = 0;
  std::size_t number = 0;
  const Shape shape = job.shape(layout.chunks());
  for (int segment = 0; segment < shape.segments; ++segment) {
    const int chunk = shape.chunk_of(segment, stage);
    largest = std::max(largest, layout.largest_gradient[at(chunk)]);
    for (const BucketCost& bucket : layout.buckets[at(chunk)]) {
      const std::int64_t share = modes[at(stage)][number++] == Way::kZero1 ? bucket.bytes / job.dp : bucket.bytes;
      all += share;
      most = std::max(most, share);
    }
  }
  if (job.dp == 1) most = all;  // several replicas step bucket by bucket
  if (!job.updates_together) most = std::min(most, largest);
  return rounded(job.update_bytes * static_cast<double>(most));
}

}  // namespace

Way parse_way(std::string_view text) {
  for (std::size_t k = 0; k < kWayNames.size(); ++k) {
    if (kWayNames[k] == text) return static_cast<Way>(k);
  }
  throw std::invalid_argument("dp_sync is '" + std::string(text) + "'; it must be early, zero1 or serial");
}

std::string_view to_string(Way way) { return kWayNames.at(static_cast<std::size_t>(way)); }

SyncKind kind_of(const Modes& modes) {
  std::array<bool, 3> seen = {};
  for (const auto& stage : modes) {
    for (const Way way : stage) seen.at(static_cast<std::size_t>(way)) = true;
  }
  if (seen[0] + seen[1] + seen[2] > 1) return SyncKind::kMixed;
  return seen[1] ? SyncKind::kZero1 : seen[2] ? SyncKind::kSerial : SyncKind::kEarly;
}

std::int64_t most_bytes(const std::vector<StagePeak>& peaks) {
  std::int64_t most = 0;
  for (const StagePeak& peak : peaks) most = std::max(most, peak.bytes);
  return most;
}

Modes uniform_modes(const PlanJob& job, const Layout& layout, Way way) {
  Modes modes;
  for (int stage = 0; stage < job.pp; ++stage) modes.emplace_back(at(layout.buckets_of(stage, job.pp)), way);
  return modes;
}

ClusterModel cluster_model(const PlanJob& job, const Layout& layout, const Modes& modes) {
  const SyncKind kind = kind_of(modes);
  ClusterModel model;
  model.dp = job.dp;
  model.hosts = job.hosts;
  model.bandwidth = job.bandwidth;
  const auto message = static_cast<double>(layout.largest_message());
  const bool known = !job.forward_links.empty() && layout.chunks() > 1;
  const double more = known ? 0 : message * (1 / job.pp_bandwidth - 1 / job.bandwidth);
  if (known) {
    model.forward_links = job.forward_links;
    model.backward_links = job.backward_links;
  }
  model.toll_ns = std::min(kNs * job.toll, most_toll_ns(job.bandwidth));
  model.latency_ns = ns(job.pp_latency + std::max(0.0, more));
  model.hop_latency_ns = ns(job.hop_latency);
  model.slice_bytes = job.slice_bytes;
  model.preempt = job.preempt;
  model.gradient_delay = job.gradient_delay;
  model.action_ns = ns(job.action_seconds);
  model.bucket_ns = ns(job.bucket_seconds);
  model.forward_ns = all_ns(layout.forward);
  model.backward_ns = all_ns(layout.backward);
  model.halves = job.may_split && !layout.spared.rebuilds_blocks();
  model.head_ns = std::min(ns(layout.head), model.backward_ns.back());
  if (!job.exposed_forward.empty()) model.forward_tp_ns = parts_ns(layout.forward_tp, model.forward_ns);
  if (!job.exposed_backward.empty()) model.backward_tp_ns = parts_ns(layout.backward_tp, model.backward_ns);
  model.activation_bytes = layout.activation_bytes;
  model.update_ns = all_ns(layout.update);
  model.stash_bytes = layout.stash_bytes;
  model.copy_bandwidth = job.copy_bandwidth;
  model.copies_share = true;
  model.dp_sync = kind == SyncKind::kZero1    ? DpSync::kZero1
                  : kind == SyncKind::kSerial ? DpSync::kSerial
                                              : DpSync::kEarly;
  const Shape shape = job.shape(layout.chunks());
  std::vector<std::size_t> number(at(job.pp), 0);
  for (int chunk = 0; chunk < layout.chunks(); ++chunk) {
    auto& buckets = model.buckets.emplace_back();
    const auto stage = at(shape.stage_of(chunk));
    for (const BucketCost& bucket : layout.buckets[at(chunk)]) {
      const Way way = modes.at(stage).at(number[stage]++);
      buckets.push_back(
          {ns(bucket.forward), ns(bucket.backward), sent(bucket.bytes, job.gradient_share, way), way == Way::kZero1});
    }
  }
  return model;
}

MemoryModel memory_model(const PlanJob& job, const Layout& layout, const Modes& modes) {
  MemoryModel model;
  const Shape shape = job.shape(layout.chunks());
  const bool in_buckets = job.dp > 1 || job.gradient_delay > 0;
  std::vector<std::size_t> bucket_of(at(job.pp), 0);
  std::vector<std::int64_t> state_of(at(job.pp), 0);
  for (int chunk = 0; chunk < layout.chunks(); ++chunk) {
    const auto stage = at(shape.stage_of(chunk));
    std::int64_t flat = 0, optimizer = 0;
    for (const BucketCost& bucket : layout.buckets[at(chunk)]) flat += bucket.bytes;
    const std::int64_t trained = layout.trainable_bytes[at(chunk)];
    // Per byte of a bucket.
    const double state = flat > 0 ? job.optimizer_bytes * static_cast<double>(trained) / static_cast<double>(flat) : 0;
    for (const BucketCost& bucket : layout.buckets[at(chunk)]) {
      const bool shared = modes.at(stage).at(bucket_of[stage]++) == Way::kZero1;
      optimizer += rounded(state * static_cast<double>(bucket.bytes) / (shared ? job.dp : 1));
    }
    state_of[stage] += optimizer;
    const Activations& needs = layout.activations[at(chunk)];
    model.chunks.push_back({
        .weights = layout.parameter_bytes[at(chunk)] * job.weight_versions,
        // In buckets, fp32 at least, twice if they are late; else with one replica autograd makes them, like the
        // parameters.
        .gradients = in_buckets ? std::max(flat, trained) * (1 + job.gradient_delay) : trained,
        .optimizer = job.offload_optimizer ? 0 : optimizer,
        .inputs = chunk > 0 ? layout.activation_bytes[at(chunk - 1)] : 0,
        .saved = needs.saved,
        .kept = layout.kept[at(chunk)],
        .forward = needs.forward,
        .backward = needs.backward,
    });
  }
  if (job.offload_optimizer) {
    model.host = state_of;
  } else {
    for (int stage = 0; stage < job.pp; ++stage) model.update.push_back(workspace(job, layout, modes, stage));
  }
  model.gradients_stay = in_buckets;
  if (layout.parts_head) {
    model.head =
        HeadBytes{layout.head_gradient_bytes, layout.parted.saved, layout.parted.forward, layout.parted.backward};
  }
  return model;
}

Programs::Programs(const PlanJob& job, Order order, int segments)
    : order_(std::move(order)), made_(generated(job, order_, segments)) {
  if (!job.flush) flows_ = without_flush(order_.name, made_.shape).every;
}

const Programs::Program& Programs::of(const Spared& spared) {
  const int chunks = made_.shape.num_chunks();
  const std::vector<bool> again = spared.without_graph(chunks), moves = spared.offloaded(chunks);
  const bool lowered = std::find(again.begin(), again.end(), true) != again.end() || !moves.empty();
  const int percent = moves.empty() ? 100 : spared.percent;
  auto& entry = programs_[{again, {moves, percent}}];
  if (entry) return *entry;
  Schedule schedule = made_;
  if (lowered) {
    schedule =
        lower(made_, {.recompute = again, .offload = moves, .offload_share = percent / 100.0, .lazy = !moves.empty()});
  }
  std::unique_ptr<const Program> kept;
  if (flows_) {
    if (lowered) {
      throw std::invalid_argument("without a flush whole chunks do not run again, and nothing leaves the device");
    }
    SimulatedProgram simulated(made_);
    kept = std::make_unique<const Program>(Program{made_, std::move(simulated), nullptr});
    schedule = *flows_;
  }
  SimulatedProgram simulated(schedule);
  entry = std::make_unique<Program>(Program{std::move(schedule), std::move(simulated), std::move(kept)});
  return *entry;
}

Programs::Run Programs::run(const PlanJob& job, const Layout& layout, const Modes& modes, const Options& options) {
  const Program& program = of(layout.spared);
  ClusterModel model = cluster_model(job, layout, modes);
  if (model.dp_sync == DpSync::kEarly) {
    if (options.gather_order != nullptr) {
      model.gather_order = *options.gather_order;
    } else {
      model.early_gathers = options.early_gathers;
    }
  }
  Run made;
  made.step = simulate_step(program.schedule, program.simulated, model,
                            {8, options.breakdown, options.memory, options.details});
  if (options.memory) {
    const Program& kept = program.kept ? *program.kept : program;
    const Shape& shape = kept.schedule.shape;
    TrainingStep with_flush;
    if (program.kept)
      with_flush = simulate_step(kept.schedule, kept.simulated, model, {8, false, true, /*sends=*/false});
    const TrainingStep& step = program.kept ? with_flush : made.step;
    made.memory = memory_curves(kept.schedule, memory_model(job, layout, modes), compute_times(step, shape),
                                copy_times(step, shape), options.details);
  }
  return made;
}

Candidate Programs::tried(const PlanJob& job, std::shared_ptr<const Layout> layout, const Modes& modes,
                          int early_gathers, bool memory) {
  Run made = run(job, *layout, modes, {.early_gathers = early_gathers, .memory = memory, .details = false});
  return {std::move(layout),
          order_,
          modes,
          early_gathers,
          made.step.step_ns,
          peaks_of(made.memory),
          std::move(made.step.gather_order)};
}

Programs::Look Programs::look(const PlanJob& job, const Layout& layout, const Modes& modes) {
  const Program& made = of(layout.spared);
  const Program& program = made.kept ? *made.kept : made;
  ClusterModel model = cluster_model(job, layout, modes);
  model.dp = 1;
  if (!model.hosts.empty()) model.hosts.resize(at(job.pp));
  const TrainingStep step =
      simulate_step(program.schedule, program.simulated, model,
                    {.max_steps = 1, .breakdown = false, .spans = true, .sends = false, .dp_sync = false});
  const Shape& shape = program.schedule.shape;
  return {step.step_ns, peaks_of(memory_curves(program.schedule, memory_model(job, layout, modes),
                                               compute_times(step, shape), copy_times(step, shape), false))};
}

std::int64_t Programs::without_dp_sync(const PlanJob& job, const Layout& layout) {
  return step_without_dp_sync(of(layout.spared).simulated,
                              cluster_model(job, layout, uniform_modes(job, layout, Way::kEarly)));
}

std::vector<StagePeak> peaks_of(const std::vector<StageMemory>& curves) {
  std::vector<StagePeak> peaks;
  for (const StageMemory& curve : curves) {
    peaks.push_back({curve.peak.device(), curve.peak.uses, curve.most_pool, curve.host});
  }
  return peaks;
}

namespace {

/// Bytes per second of no message are more.
double fastest(const PlanJob& job) {
  double most = job.bandwidth;
  for (const auto* links : {&job.forward_links, &job.backward_links}) {
    for (const double rate : *links) most = std::max(most, rate);
  }
  return most;
}

/// What the busiest card has to send in a step: messages to other stages, and DP.sync. What stays inside of a host
/// costs no card anything.
std::int64_t least_sending_ns(const PlanJob& job, const Layout& layout) {
  const Shape shape = job.shape(layout.chunks());
  std::vector<double> of_host, sums(at(job.pp), 0);
  for (int chunk = 0; chunk < layout.chunks(); ++chunk) {
    for (const BucketCost& bucket : layout.buckets[at(chunk)]) {
      sums[at(shape.stage_of(chunk))] += static_cast<double>(sent(bucket.bytes, job.gradient_share, Way::kEarly));
    }
  }
  const auto send = [&](int from, int to, double seconds) {
    if (!uses_card(job.hosts, from, to)) return;
    const int host = host_of(job.hosts, from);
    of_host.resize(std::max(of_host.size(), at(host) + 1), 0);
    of_host[at(host)] += seconds;
  };
  const double message = job.micro_batches / fastest(job);
  const int replicas = job.hosts.empty() ? 1 : job.dp;  // with a card for each rank all do the same
  for (int replica = 0; replica < replicas; ++replica) {
    const int first = replica * job.pp, next = (replica + 1) % job.dp * job.pp;
    for (int stage = 0; stage < job.pp; ++stage) {
      send(first + stage, next + stage, 2 * sums[at(stage)] * (job.dp - 1) / job.dp / job.bandwidth);
    }
    for (int chunk = 0; chunk + 1 < layout.chunks(); ++chunk) {
      const int one = first + shape.stage_of(chunk), other = first + shape.stage_of(chunk + 1);
      const double seconds = static_cast<double>(layout.activation_bytes[at(chunk)]) * message;
      send(one, other, seconds);
      send(other, one, seconds);
    }
  }
  const double most = of_host.empty() ? 0 : *std::max_element(of_host.begin(), of_host.end());
  return static_cast<std::int64_t>(kNs * most * (1 - kRounding));
}

}  // namespace

std::int64_t least_step_ns(const PlanJob& job, const Layout& layout, bool splits) {
  const Shape shape = job.shape(layout.chunks());
  double most = 0, before = 0;
  const std::vector<bool> again = layout.spared.without_graph(layout.chunks());
  for (int stage = 0; stage < job.pp; ++stage) {
    double own = 0, update = 0;
    for (int segment = 0; segment < shape.segments; ++segment) {
      const int chunk = shape.chunk_of(segment, stage);
      own += layout.forward[at(chunk)] + layout.backward[at(chunk)] + 2 * job.action_seconds;
      // The last chunk's backward may follow its forward at once: then nothing runs again.
      if (again[at(chunk)] && chunk + 1 < layout.chunks()) {
        own += layout.forward[at(chunk)] - layout.forward_tp[at(chunk)] + job.action_seconds;
      }
      update += layout.update[at(chunk)] / job.dp;  // zero1
    }
    // Without a flush the pipeline is full, and an update has the memory of another version to go to.
    if (!job.flush) before = 0;
    most = std::max(most, before + job.micro_batches * own + update);
    // Of the first segment chunk `stage` is on this stage.
    const double bytes = job.hosts.empty() ? static_cast<double>(layout.activation_bytes[at(stage)]) : 0;
    const double message = job.pp_latency + bytes / fastest(job);
    before += layout.forward[at(stage)] + job.action_seconds + message;
    if (!splits) before += layout.backward[at(stage)] + job.action_seconds + message;
  }
  return std::max(static_cast<std::int64_t>(kNs * most * (1 - kRounding)), least_sending_ns(job, layout));
}

std::int64_t least_bytes(const PlanJob& job, const Layout& layout, bool shares_optimizer) {
  const Way way = shares_optimizer ? Way::kZero1 : Way::kEarly;
  const MemoryModel model = memory_model(job, layout, uniform_modes(job, layout, way));
  const Shape shape = job.shape(layout.chunks());
  std::int64_t most = 0;
  for (int stage = 0; stage < job.pp; ++stage) {
    std::int64_t own = 0;
    for (int segment = 0; segment < shape.segments; ++segment) {
      const ChunkBytes& chunk = model.chunks[at(shape.chunk_of(segment, stage))];
      own += chunk.weights + chunk.gradients + chunk.optimizer;
    }
    most = std::max(most, own);
  }
  return most;
}

}  // namespace fold3d::core
