#pragma once

#include <cstdint>
#include <vector>

#include "core/sim/copy_lanes.h"
#include "core/sim/dp_sync.h"
#include "core/sim/simulate.h"
#include "core/sim/simulated_program.h"

namespace fold3d::core {

/// One simulation: the ranks' compute lanes, fed by the network and held back by DP.sync.
class TrainingRun {
 public:
  struct Parts {
    bool messages = true;  ///< false: what a rank needs from another is there at once
    bool copies = true;    ///< false: stashes move in no time
    bool dp_sync = true;   ///< false: no DP.sync, no norm; the next step may start at once
  };

  TrainingRun(const SimulatedProgram& program, const ClusterModel& model, const Parts& parts,
              const SimulationOptions& options);

  /// Runs to a steady state, then until the network is silent. Throws std::invalid_argument if it gets stuck.
  void run();

  std::int64_t step_ns() const;
  int steps() const { return static_cast<int>(ends_.size()); }
  bool steady() const { return steady_; }
  /// Per step, by rank: computing, with waiting for TP.sync; that waiting; bytes through the network.
  std::int64_t compute_ns(int stage) const;
  std::int64_t exposed_tp_ns(int stage) const;
  std::int64_t message_bytes(int rank) const { return message_bytes_[static_cast<std::size_t>(rank)] / steps(); }
  std::int64_t dp_bytes(int rank) const { return dp_bytes_[static_cast<std::size_t>(rank)] / steps(); }
  /// Per step: what the busiest card sends or receives.
  std::int64_t busiest_card_bytes() const;
  std::int64_t messages() const { return static_cast<std::int64_t>(messages_.size()); }
  int early_gathers() const { return dp_sync_.early_gathers() / steps(); }
  std::vector<std::vector<int>> gather_order() const { return dp_sync_.gather_order(); }
  const Network& network() const { return network_; }
  std::vector<SimulatedSpan> take_spans();

 private:
  struct Rank {
    std::size_t next = 0;  // in its program
    int step = 0;
    bool busy = false;
    bool came = false;                                 // to the copies before its next action
    bool took = false;                                 // what they bring for it
    std::int64_t ready = 0;                            // when they let it go on
    int bucket = -1;                                   // next one that the forward under way has to wait for
    double charged = 0;                                // bytes of its card that computing has been delayed for
    std::size_t spans_of_last = 0, spans_of_this = 0;  // how many spans there were when its steps began
  };
  struct Message {
    int from_rank, to_rank, from_node, to_node;
  };

  void dispatch(const Event& event);
  void try_start(std::int64_t now, int rank);
  void come_to_copies(std::int64_t now, int rank);
  bool waits_for_copies(std::int64_t now, int rank);
  void start_buckets(std::int64_t now, int rank);
  void compute(std::int64_t now, int rank, std::int64_t duration);
  std::int64_t toll_until(std::int64_t now, int rank);
  std::int64_t update_of(int chunk) const;
  void computed(std::int64_t now, int rank);
  void feed(std::int64_t now, int rank, const SimulatedProgram::Edge& edge, int from_node);
  void arrived(std::int64_t now, int rank, int node, bool through);
  void gradients(std::int64_t start, int rank, const SimulatedProgram::Node& node, std::int64_t duration);
  void head_gradients(std::int64_t now);
  bool is_of_head(int bucket) const;
  void end_of_program(std::int64_t now, int rank);
  void sent(const Network::Sent& sent);
  /// How many steps' gradients the rank's step has to wait for.
  int awaited(const Rank& rank) const { return rank.step - (parts_.dp_sync ? model_.gradient_delay : 0); }
  std::size_t window() const;
  std::int64_t length_until(std::size_t step) const;
  std::int64_t start_of_last_step() const { return ends_.size() > 1 ? ends_[ends_.size() - 2] : 0; }
  std::int64_t share_of(const Action& action, std::int64_t forward, std::int64_t backward) const;
  std::int64_t duration_of(const SimulatedProgram::Node& node) const;
  const SimulatedProgram::Node& current(int rank) const;
  int& arrivals(int rank, int node);
  int& messages_for(int rank, int node);
  int stage_of(int rank) const { return rank % program_.shape.pp; }

  const SimulatedProgram& program_;
  const ClusterModel& model_;
  Parts parts_;
  SimulationOptions options_;
  int replicas_;
  EventQueue events_;
  Network network_;
  DpSyncLanes dp_sync_;
  std::vector<Rank> ranks_;
  std::vector<int> ranks_of_host_;
  std::vector<CopyLanes> copies_;  // by rank
  std::vector<int> arrivals_;      // rank's replica * nodes + node: since the start
  std::vector<int> messages_for_;  // likewise: those of messages
  std::vector<int> finished_;      // by step: ranks
  std::vector<std::int64_t> ends_;
  int last_step_;
  bool steady_ = false;
  std::vector<Message> messages_;
  std::vector<std::int64_t> message_bytes_;
  std::vector<std::int64_t> dp_bytes_;
  std::vector<std::int64_t> card_sent_;
  std::vector<std::int64_t> card_received_;
  std::vector<SimulatedSpan> spans_;
};

}  // namespace fold3d::core
