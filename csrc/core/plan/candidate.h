#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/memory/memory_curve.h"
#include "core/plan/layout.h"
#include "core/sim/simulate.h"
#include "core/sim/simulated_program.h"

namespace fold3d::core {

/// How the gradients of a bucket are summed over the replicas: as DpSync's values of the same name.
enum class Way : std::uint8_t { kEarly, kZero1, kSerial };
/// Throws std::invalid_argument that lists the names "early", "zero1", "serial".
Way parse_way(std::string_view text);
std::string_view to_string(Way way);

/// By stage: the way of each of its buckets, in forward order. Either all are kSerial, or none is.
using Modes = std::vector<std::vector<Way>>;
/// By stage: its early buckets in the order of their gathers (ClusterModel::gather_order).
using GatherOrder = std::vector<std::vector<int>>;

/// What all buckets of a plan have; kMixed: they differ.
enum class SyncKind : std::uint8_t { kEarly, kMixed, kZero1, kSerial };
SyncKind kind_of(const Modes& modes);

/// A schedule by name, or one that is given.
struct Order {
  std::string name;
  int group_size = 0;                          ///< 0: the schedule's default
  std::shared_ptr<const Schedule> given = {};  ///< of that name
  bool operator==(const Order&) const = default;
};

/// The most that a rank of a stage has in a step.
struct StagePeak {
  std::int64_t bytes = 0;  ///< on its device
  MemoryUses uses = {};    ///< at that moment
  std::int64_t pool = 0;   ///< the most in the host's pool
  std::int64_t host = 0;   ///< in host memory all the time, beside the pool
};

/// Bytes of the fullest rank.
std::int64_t most_bytes(const std::vector<StagePeak>& peaks);

/// A plan, and what the simulator and the memory model say of it.
struct Candidate {
  std::shared_ptr<const Layout> layout;
  Order order;
  Modes modes;
  int early_gathers = -1;
  std::int64_t step_ns = 0;
  std::vector<StagePeak> peaks;  ///< by stage; empty where nobody has asked for memory
  GatherOrder gather_order;

  int segments(int pp) const { return layout->chunks() / pp; }
  std::int64_t memory() const { return most_bytes(peaks); }
};

Modes uniform_modes(const PlanJob& job, const Layout& layout, Way way);

/// What the simulator is told of a layout.
ClusterModel cluster_model(const PlanJob& job, const Layout& layout, const Modes& modes);
/// What the memory model is told of it.
MemoryModel memory_model(const PlanJob& job, const Layout& layout, const Modes& modes);

/// The programs of one order and number of segments: generated, lowered and made ready for the simulator once.
class Programs {
 public:
  /// Throws std::invalid_argument as generate.
  Programs(const PlanJob& job, Order order, int segments);

  struct Program {
    Schedule schedule;           ///< with what is computed again and copied to the pool
    SimulatedProgram simulated;  ///< of it
    /// Where that has no flush: one step with it, in which as many stashes are kept at once.
    std::unique_ptr<const Program> kept;
  };
  const Program& of(const Spared& spared);
  const Schedule& compute_only() const { return made_; }
  const Order& order() const { return order_; }

  struct Options {
    int early_gathers = -1;
    const GatherOrder* gather_order = nullptr;
    bool breakdown = false;
    bool memory = false;
    bool details = true;  ///< sends among the step's spans, and memory's points; else only peaks
  };
  struct Run {
    TrainingStep step;
    std::vector<StageMemory> memory;  ///< by stage, where it was asked for
  };
  Run run(const PlanJob& job, const Layout& layout, const Modes& modes, const Options& options);

  /// `run` as a candidate.
  Candidate tried(const PlanJob& job, std::shared_ptr<const Layout> layout, const Modes& modes, int early_gathers,
                  bool memory);

  /// A step of one replica by itself, without DP.sync. That moves peaks by a message or two, and is most of what there
  /// is to simulate; the step takes no longer than with it, where there is a flush.
  struct Look {
    std::int64_t step_ns = 0;
    std::vector<StagePeak> peaks;  ///< by stage
  };
  Look look(const PlanJob& job, const Layout& layout, const Modes& modes);

  /// What a step would take without DP.sync.
  std::int64_t without_dp_sync(const PlanJob& job, const Layout& layout);

 private:
  Order order_;
  Schedule made_;
  std::optional<Schedule> flows_;  // what repeats without a flush
  std::map<std::pair<std::vector<bool>, std::pair<std::vector<bool>, int>>, std::unique_ptr<Program>> programs_;
};

std::vector<StagePeak> peaks_of(const std::vector<StageMemory>& curves);

/// No step of this layout and schedule takes less: a stage waits for the first micro-batch, computes all of them, and
/// its last gradient goes on to the first stage; or a card sends what it has to send. `splits`: backwards are split,
/// so weights' gradients may come last.
std::int64_t least_step_ns(const PlanJob& job, const Layout& layout, bool splits);

/// No plan with this cut and with these ways of DP.sync needs less on the fullest rank: weights, gradients and
/// optimizer.
std::int64_t least_bytes(const PlanJob& job, const Layout& layout, bool shares_optimizer);

}  // namespace fold3d::core
