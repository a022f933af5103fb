#pragma once

#include <cstdint>
#include <vector>

#include "core/cluster_model.h"
#include "core/event_queue.h"
#include "core/network.h"

namespace fold3d::core {

/// Layers [first_layer, end_layer) of a chunk, whose gradients are summed together.
struct Bucket {
  int chunk = 0;
  int first_layer = 0;
  int end_layer = 0;
  std::int64_t bytes = 0;
};

/// DP.sync of a simulated step: per stage one lane for reduce-scatters, in the order in which the backward produces
/// the buckets, and one for gathers, which the network serves after them. A collective starts when every rank of
/// the stage is there and ends (dp-1) hops after its last byte has left.
///
/// Of the gathers that may run, the one that the next forward needs first goes first. In the idle times of a backward
/// that is the bucket reduced last, so that early gathers are spread over the whole model and what is left for the
/// forward is nowhere much more than the forward hides. ClusterModel::early_gathers bounds their number.
class DpSyncLanes {
 public:
  DpSyncLanes(const Shape& shape, const ClusterModel& model, int replicas, EventQueue& events, Network& network);

  /// Buckets of `chunk` in order of layers: numbers [first, end) of bucket().
  int first_bucket(int chunk) const { return first_bucket_[static_cast<std::size_t>(chunk)]; }
  int end_bucket(int chunk) const { return first_bucket_[static_cast<std::size_t>(chunk) + 1]; }
  const Bucket& bucket(int number) const { return buckets_[static_cast<std::size_t>(number)]; }

  /// One rank's gradients of the bucket are complete (kSerial: and the rank has finished its last backward).
  void produced(std::int64_t now, int bucket);
  /// A flow's last byte has left; `token` is what the network was given.
  void flow_sent(std::int64_t now, int token);
  /// Handles kCollectiveDone and kVoted. Returns true if gates may have opened.
  bool handle(const Event& event);
  /// Whether the bucket's parameters are up to date after `steps` steps.
  bool is_open(int bucket, int steps) const;

  /// What a flow is, by the token that the network was given.
  struct FlowInfo {
    int rank = 0;  ///< that sends
    int chunk = 0;
    bool gather = false;
  };
  FlowInfo flow_info(int token) const;
  /// Gathers that began before their stage's last reduce-scatter was done, on all stages since the start.
  int early_gathers() const { return early_gathers_; }

 private:
  struct Collective {
    int bucket = 0;
    bool gather = false;
    int flows = 0;  // not yet sent
  };
  struct Flow {
    int collective = 0;
    int rank = 0;
  };
  struct Lane {
    std::vector<int> waiting;  // buckets
    int active = -1;           // collective
  };
  struct Stage {
    Lane reduce;
    Lane gather;
    int buckets = 0;
    int reduced = 0;   // buckets, in this step
    int early = 0;     // gathers begun, in this step, before all were reduced
    int gathered = 0;  // buckets, since the start
  };

  void one_sent(std::int64_t now, int collective);
  void start_next(std::int64_t now, int stage, bool gather);
  void reduced(std::int64_t now, int bucket);
  void release_gather(std::int64_t now, int bucket);
  int stage_of(int bucket) const { return shape_.stage_of(buckets_[static_cast<std::size_t>(bucket)].chunk); }
  Stage& stage_at(int stage) { return stages_[static_cast<std::size_t>(stage)]; }
  Lane& lane_of(const Collective& collective);

  Shape shape_;
  const ClusterModel& model_;
  int replicas_;
  EventQueue& events_;
  Network& network_;
  std::int64_t vote_ns_ = 0;
  std::vector<Bucket> buckets_;
  std::vector<int> first_bucket_;
  std::vector<int> produced_;  // ranks that have the bucket, in this step
  std::vector<int> gathered_;  // steps whose gather of the bucket is done
  std::vector<Stage> stages_;
  std::vector<Collective> collectives_;
  std::vector<Flow> flows_;
  int reduced_ = 0;  // buckets of all stages in this step
  int voted_ = 0;    // steps
  int early_gathers_ = 0;
};

}  // namespace fold3d::core
