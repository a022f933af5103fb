#pragma once

#include <cstdint>
#include <vector>

#include "core/ir/schedule.h"
#include "core/sim/cluster_model.h"
#include "core/sim/simulated_program.h"

namespace fold3d::core {

/// One thing that a rank does in the simulated step.
struct SimulatedSpan {
  enum class Lane : std::uint8_t {
    kCompute,
    kSendForward,
    kSendBackward,
    kReduceScatter,
    kGather,
    kOffload,
    kPrefetch
  };
  int rank = 0;
  Lane lane = Lane::kCompute;
  Action action;  ///< what is computed or sent; kReduce of the chunk for DP.sync
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;
  std::int64_t bytes = 0;
};

/// A rank's step: step_ns = compute + exposed_tp + bubble + exposed_pp + exposed_dp + exposed_offload.
struct RankBreakdown {
  std::int64_t compute_ns = 0;
  std::int64_t exposed_tp_ns = 0;       ///< waiting for TP.sync in forwards and backwards, as the model says
  std::int64_t bubble_ns = 0;           ///< idle time if communication were free
  std::int64_t exposed_pp_ns = 0;       ///< by which PP.sync alone makes the step longer
  std::int64_t exposed_dp_ns = 0;       ///< by which DP.sync makes it longer still
  std::int64_t exposed_offload_ns = 0;  ///< by which copies to the pool and back make it longer still
  std::int64_t hidden_dp_ns = 0;        ///< time of the rank's DP.sync on an idle network that is not exposed
  std::int64_t pp_bytes = 0;            ///< sent through the network per step
  std::int64_t dp_bytes = 0;
};

struct TrainingStep {
  std::int64_t step_ns = 0;          ///< time of the last simulated step, from the end of the one before; where
                                     ///< gradients are late the mean of the last two
  int steps = 0;                     ///< simulated
  bool steady = false;               ///< the last two steps took the same time, or the last two pairs of steps
  std::int64_t limit_ns = 0;         ///< max(compute + bubble, what the busiest card has to send or receive)
  std::vector<RankBreakdown> ranks;  ///< of the replicas simulated (ClusterModel::distinct_replicas)
  /// kEarly, kUnvoted: the order of each stage's early gathers in the last step, as in ClusterModel::gather_order. A
  /// run that is given this order, and no limit early_gathers, takes no longer.
  std::vector<std::vector<int>> gather_order;
  int early_gathers = 0;         ///< per step: gathers that began before their stage's last reduce-scatter was done
  std::int64_t preemptions = 0;  ///< over all steps: DP.sync paused for PP.sync
  std::int64_t longest_message_wait_ns = 0;  ///< over all steps: from queueing a PP message to its first byte
  std::int64_t mean_message_wait_ns = 0;
  std::vector<SimulatedSpan> spans;  ///< of the last step, in order of start; times from its beginning
};

struct SimulationOptions {
  int max_steps = 8;      ///< give up waiting for a steady state, >= 3; >= 1 without DP.sync
  bool breakdown = true;  ///< fill ranks' bubble and exposed times and limit_ns; costs two short runs without DP.sync
  bool spans = false;
  bool sends = true;    ///< with spans: those of the network, too
  bool dp_sync = true;  ///< false: nothing is summed over the replicas
};

/// Runs training steps of `schedule` (its compute actions, OFFLOAD and PREFETCH; transfers and DP.sync follow from
/// them) on the modelled cluster until two steps take the same time. A rank computes its list in order, each action as
/// soon as what it waits for (waits_for) is there; the first forward of a chunk waits, bucket by bucket, for DP.sync of
/// the step before. Deterministic. Throws std::invalid_argument if the model does not fit the schedule, the schedule
/// has no backward, or an action can never start (validate() tells why).
///
/// Not modelled: receives posted too late; the time of host-device copies other than those of stashes; TCP's sharing of
/// a link (a card does one thing at a time); the ring's single steps (a collective is one flow per rank).
TrainingStep simulate_step(const Schedule& schedule, const ClusterModel& model, const SimulationOptions& options = {});
/// The same of a program that was made of `schedule` before.
TrainingStep simulate_step(const Schedule& schedule, const SimulatedProgram& program, const ClusterModel& model,
                           const SimulationOptions& options);

/// What a step takes where nothing is summed over the replicas. Throws as simulate_step.
std::int64_t step_without_dp_sync(const SimulatedProgram& program, const ClusterModel& model);

}  // namespace fold3d::core
