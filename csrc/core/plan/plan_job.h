#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/ir/schedule.h"
#include "core/plan/layer_reads.h"
#include "core/sim/cluster_model.h"

namespace fold3d::core {

/// What a layer needs for one micro-batch, parameters and their gradients aside.
struct LayerBytes {
  std::int64_t saved = 0;     ///< kept from its forward to its backward
  std::int64_t outputs = 0;   ///< those of `saved` that it hands on to the next layer
  std::int64_t forward = 0;   ///< most at any moment of its forward, what it keeps included
  std::int64_t backward = 0;  ///< most at any moment of its backward, beside what the layers before it keep
};

/// What layers cost where modules inside of blocks compute again what their backward needs.
struct InsideCosts {
  std::vector<LayerBytes> layers;
  std::vector<double> seconds;  ///< by layer: what runs again
};

/// What the planner is told about a training job. Layers are numbered 0 (prologue), 1 ... blocks, blocks + 1
/// (epilogue); parameters by their places in `gradient_bytes`. Seconds and bytes are of one micro-batch on one rank.
struct PlanJob {
  int dp = 1;                  ///< replicas
  int pp = 1;                  ///< stages
  int micro_batches = 1;       ///< per step and replica
  Style style = Style::kLoop;  ///< on which stages the chunks live; the search tries only schedules of it

  std::vector<int> starts;     ///< blocks at which a chunk may start, ascending, the first is 0
  std::string closed_because;  ///< why the model cannot be cut at some block; may be empty
  LayerReads reads;            ///< parameters
  std::vector<std::int64_t> gradient_bytes;
  std::vector<std::int64_t> parameter_bytes;

  std::vector<double> forward;
  std::vector<double> backward;
  std::vector<double> exposed_forward;  ///< parts of these: waiting for TP.sync; empty = none
  std::vector<double> exposed_backward;
  std::vector<std::int64_t> sums;  ///< of TP.sync, kept where a forward runs again; empty = none
  std::vector<LayerBytes> layers;
  std::vector<InsideCosts> inside;             ///< by Choice::inside
  std::vector<std::int64_t> activation_bytes;  ///< by block: what it hands to the next one

  double update_seconds = 0;   ///< the optimizer, per byte of gradients
  double optimizer_bytes = 0;  ///< its state, per byte of gradients
  double update_bytes = 0;     ///< what an update needs beside it, per byte of gradients that are stepped at once
  bool updates_together = false;
  bool offload_optimizer = false;  ///< its state lies in host memory

  double bandwidth = 1e9;     ///< bytes per second of a card, each way
  double pp_bandwidth = 1e9;  ///< of PP.sync
  /// Bytes per second of the messages over each border between chunks, forward and backward; of `pp_bandwidth` where
  /// they are empty. They are of the cut that PlanSpace::ranges says.
  std::vector<double> forward_links;
  std::vector<double> backward_links;
  /// By stage: how long its ranks take, relative to the times here; empty: as long.
  std::vector<double> stage_times;
  double toll = 0;         ///< seconds that a rank computes longer for each byte that it sends meanwhile
  double pp_latency = 0;   ///< seconds
  double hop_latency = 0;  ///< seconds
  std::int64_t slice_bytes = 1 << 20;
  bool preempt = true;
  double action_seconds = 0;
  double bucket_seconds = 0;
  double copy_bandwidth = 25e9;
  double gradient_share = 1;  ///< of the bytes of gradients what travels
  int gradient_delay = 0;
  bool flush = true;        ///< false: steps follow each other without one, see core/passes/repeat.h; "1f1b" alone
  int weight_versions = 1;  ///< copies of its weights that a rank keeps
  Hosts hosts;              ///< of every rank, as ClusterModel::hosts

  std::optional<std::int64_t> memory_limit;  ///< bytes of a rank
  std::optional<std::int64_t> pool_limit;    ///< bytes of a rank's pool
  bool pool_is_elsewhere = false;            ///< it takes none of the memory that is limited
  bool may_split = true;  ///< backwards run in halves; else a split one is as long as a whole one, and no better

  Shape shape(int chunks) const { return {pp, chunks / pp, micro_batches, style}; }
  double time_of_stage(int stage) const {
    return stage_times.empty() ? 1 : stage_times[static_cast<std::size_t>(stage)];
  }
  int blocks() const { return static_cast<int>(activation_bytes.size()); }
  /// Throws std::invalid_argument naming what is missing, or negative.
  void check() const;
};

}  // namespace fold3d::core
