#include "core/sim/simulate.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/sim/training_run.h"

namespace fold3d::core {
namespace {

constexpr int kLeastSteps = 3;  // one without DP.sync before it, two to compare

/// What the step would take without DP.sync; `messages` false: and with communication for free.
std::int64_t without_dp_sync(const SimulatedProgram& program, const ClusterModel& model, bool messages,
                             const SimulationOptions& options) {
  TrainingRun run(program, model, {.messages = messages, .copies = false, .dp_sync = false},
                  {options.max_steps, false, false});
  run.run();
  return run.step_ns();
}

/// What the step would take if stashes moved in no time.
std::int64_t without_copies(const SimulatedProgram& program, const ClusterModel& model,
                            const SimulationOptions& options) {
  TrainingRun run(program, model, {.copies = false}, {options.max_steps, false, false});
  run.run();
  return run.step_ns();
}

bool has_copies(const Schedule& schedule, const ClusterModel& model) {
  if (model.stash_bytes.empty()) return false;
  for (const auto& actions : schedule.ranks) {
    for (const Action& action : actions) {
      if (is_copy(action.kind)) return true;
    }
  }
  return false;
}

}  // namespace

std::int64_t step_without_dp_sync(const SimulatedProgram& program, const ClusterModel& model) {
  model.check(program.shape);
  return without_dp_sync(program, model, true, {});
}

TrainingStep simulate_step(const Schedule& schedule, const ClusterModel& model, const SimulationOptions& options) {
  model.check(schedule.shape);
  return simulate_step(schedule, SimulatedProgram(schedule), model, options);
}

TrainingStep simulate_step(const Schedule& schedule, const SimulatedProgram& program, const ClusterModel& model,
                           const SimulationOptions& options) {
  model.check(schedule.shape);
  const int least = options.dp_sync ? kLeastSteps : 1;
  if (options.max_steps < least) {
    throw std::invalid_argument("max_steps is " + std::to_string(options.max_steps) + "; a steady state needs " +
                                std::to_string(least));
  }
  TrainingRun run(program, model, {.dp_sync = options.dp_sync}, options);
  run.run();

  TrainingStep result;
  result.step_ns = run.step_ns();
  result.steps = run.steps();
  result.steady = run.steady();
  result.early_gathers = run.early_gathers();
  result.gather_order = run.gather_order();
  result.preemptions = run.network().counters().preemptions;
  result.longest_message_wait_ns = run.network().counters().longest_wait_ns;
  result.mean_message_wait_ns = run.messages() > 0 ? run.network().counters().total_wait_ns / run.messages() : 0;
  if (options.spans) result.spans = run.take_spans();

  const Shape& shape = schedule.shape;
  result.ranks.resize(static_cast<std::size_t>(model.distinct_replicas(shape.pp) * shape.pp));
  for (int rank = 0; rank < static_cast<int>(result.ranks.size()); ++rank) {
    RankBreakdown& account = result.ranks[static_cast<std::size_t>(rank)];
    account.exposed_tp_ns = run.exposed_tp_ns(rank % shape.pp);
    account.compute_ns = run.compute_ns(rank % shape.pp) - account.exposed_tp_ns;
    account.pp_bytes = run.message_bytes(rank);
    account.dp_bytes = run.dp_bytes(rank);
  }
  if (!options.breakdown) return result;

  const std::int64_t with_messages = without_dp_sync(program, model, true, options);
  const std::int64_t ideal = without_dp_sync(program, model, false, options);
  const std::int64_t free_copies =
      has_copies(schedule, model) ? without_copies(program, model, options) : result.step_ns;
  result.limit_ns = std::max(ideal, run.network().duration(run.busiest_card_bytes()));
  for (RankBreakdown& account : result.ranks) {
    account.bubble_ns = ideal - account.compute_ns - account.exposed_tp_ns;
    account.exposed_pp_ns = with_messages - ideal;
    account.exposed_dp_ns = free_copies - with_messages;
    account.exposed_offload_ns = result.step_ns - free_copies;
    account.hidden_dp_ns = std::max<std::int64_t>(0, run.network().duration(account.dp_bytes) - account.exposed_dp_ns);
  }
  return result;
}

}  // namespace fold3d::core
