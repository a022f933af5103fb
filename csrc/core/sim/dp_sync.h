#pragma once

#include <cstdint>
#include <vector>

#include "core/network/event_queue.h"
#include "core/network/network.h"
#include "core/sim/cluster_model.h"
#include "core/sim/simulated_buckets.h"

namespace fold3d::core {

/// DP.sync of a simulated step: per stage one lane for reduce-scatters, in the order in which the backward produces
/// the buckets, and one for gathers, which the network serves after them. A collective starts when every rank of
/// the stage is there and ends (dp-1) hops after its last byte has left.
///
/// Early gathers go in the planned order (ClusterModel::gather_order). Where there is none, of the gathers that may run
/// the one that the next forward needs first goes first. In the idle times of a backward that is the bucket reduced
/// last, so that early gathers are spread over the whole model and what is left for the forward is nowhere much more
/// than the forward hides. ClusterModel::early_gathers bounds their number. zero1 buckets come behind the early ones,
/// in forward order, each when it has been updated after the norm.
///
/// With ClusterModel::gradient_delay the norm of a step comes when all ranks have finished the next one; behind it go
/// the gathers of its zero1 buckets, and behind these the early gathers of that next step, for which a whole step is
/// left: they are in the order of steps, and within one in that of gather_order, without the waits of that. The network
/// serves gathers before reduce-scatters then: what they bring is of the step before, and needed first. Where
/// no step ends with a flush, norm and gathers wait for no end of a step, but only for the sums.
class DpSyncLanes {
 public:
  /// Throws std::invalid_argument if the model's gather_order does not fit its buckets.
  DpSyncLanes(const Shape& shape, const ClusterModel& model, int replicas, bool flushes, EventQueue& events,
              Network& network);

  const SimulatedBuckets& buckets() const { return buckets_; }
  /// One rank's gradients of the bucket are complete (kSerial: and the rank has finished its last backward).
  void produced(std::int64_t now, int bucket);
  /// All ranks have finished a step.
  void all_finished(std::int64_t now);
  /// A flow's last byte has left; `token` is what the network was given.
  void flow_sent(std::int64_t now, int token);
  /// Handles kCollectiveStart, kCollectiveDone, kNormKnown and kUpdated. Returns true if arbiters may have opened.
  bool handle(const Event& event);
  /// Whether the bucket's gradients or parameters have been gathered after `steps` steps, so that a forward may use it.
  bool is_open(int bucket, int steps) const;
  /// Whether the stage's ranks may compute again after the norm of step `steps`.
  bool is_updated(int stage, int steps) const { return stages_[static_cast<std::size_t>(stage)].updated >= steps; }

  /// What a flow is, by the token that the network was given.
  struct FlowInfo {
    int rank = 0;  ///< that sends
    int chunk = 0;
    bool gather = false;
  };
  FlowInfo flow_info(int token) const;
  /// Gathers that began before their stage's last reduce-scatter was done, on all stages since the start.
  int early_gathers() const { return early_gathers_; }
  /// Early buckets of each stage in the order in which they were gathered in the last step, as in
  /// ClusterModel::gather_order.
  std::vector<std::vector<int>> gather_order() const;

 private:
  struct Collective {
    int bucket = 0;
    bool gather = false;
    int flows = 0;  // not yet sent
    std::int64_t bytes = 0;
  };
  struct Flow {
    int collective = 0;
    int rank = 0;
  };
  struct Waiting {
    int bucket = 0;
    int step = 0;  // whose gradients it has, from 0
  };
  struct Lane {
    std::vector<Waiting> waiting;
    int active = -1;  // collective
  };
  struct Stage {
    Lane reduce;
    Lane gather;
    std::vector<int> order;  // planned gathers, or empty
    std::size_t begun = 0;   // early gathers, in this step
    std::vector<int> log;    // early gathers since the start
    int early_buckets = 0;
    int reduced = 0;   // buckets, in this step
    int summed = 0;    // buckets, since the start
    int early = 0;     // gathers begun, in this step, before all were reduced
    int gathered = 0;  // buckets, since the start
    int updated = 0;   // steps whose update after the norm is done
  };

  void plan(int stage, const std::vector<int>& order);
  void one_sent(std::int64_t now, int collective);
  void start_next(std::int64_t now, int stage, bool gather);
  void start_flows(std::int64_t now, int collective);
  std::vector<Waiting>::iterator next_gather(Stage& stage);
  int place_of(const Stage& stage, const Waiting& gather) const;
  void reduced(std::int64_t now, int bucket);
  void ask_norm(std::int64_t now);
  void voted(std::int64_t now);
  void release_gather(std::int64_t now, int bucket, int step);
  int delay() const { return model_.gradient_delay; }
  /// Whether gradients are late by a wait for the end of the next step.
  bool waits_for_end() const { return delay() > 0 && flushes_; }
  int stage_of(int bucket) const { return shape_.stage_of(buckets_[bucket].chunk); }
  Stage& stage_at(int stage) { return stages_[static_cast<std::size_t>(stage)]; }
  Lane& lane_of(const Collective& collective);

  Shape shape_;
  const ClusterModel& model_;
  int replicas_;
  bool flushes_;
  EventQueue& events_;
  Network& network_;
  SimulatedBuckets buckets_;
  std::int64_t vote_ns_ = 0;
  std::vector<int> produced_;  // ranks that have the bucket, in this step
  std::vector<int> gathered_;  // steps whose gather of the bucket is done
  std::vector<int> summed_;    // steps whose reduce-scatter of the bucket is done
  std::vector<Waiting> held_;  // gathers that wait for the end of their step
  std::vector<Stage> stages_;
  std::vector<Collective> collectives_;
  std::vector<Flow> flows_;
  int asked_ = 0;     // steps whose norm is under way or known
  int voted_ = 0;     // steps
  int finished_ = 0;  // steps
  int early_gathers_ = 0;
};

}  // namespace fold3d::core
