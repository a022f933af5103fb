#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/ir/schedule.h"
#include "core/network/hold_rule.h"
#include "core/network/hosts.h"

namespace fold3d::core {

/// How the gradients of a step are summed over the data-parallel group (DP.sync). Every way moves the bytes of one
/// ring all-reduce per bucket, as a reduce-scatter and a gather; they differ in when each half may run and in what
/// waits for it. "The norm" is the exchange of one number over all ranks (gradient norm, inf) after the last
/// reduce-scatter; the optimizer may not run before it.
enum class DpSync {
  kZero1,     ///< reduce-scatter under the backward; norm; parameters gathered in forward order under the next forward
  kEarly,     ///< as kZero1, but gradients are gathered, in idle network time before or after the norm
  kBlocking,  ///< all-reduce under the backward; the next step starts when all of it is done
  kSerial,    ///< all-reduce after the rank's last backward; the next step starts when all of it is done
  kUnvoted,   ///< Fold3D as published: as kEarly without the norm, so without exact clipping
};

inline constexpr std::array<std::string_view, 5> kDpSyncNames = {"zero1", "early", "blocking", "serial", "unvoted"};
std::string_view to_string(DpSync dp_sync);
/// Inverse of to_string. Throws std::invalid_argument that lists the names.
DpSync parse_dp_sync(std::string_view text);

/// A part of a chunk whose gradients are summed together; the parts of a chunk follow each other in forward order.
struct BucketModel {
  std::int64_t forward_ns = 0;   ///< its share of ClusterModel::forward_ns is this over the sum of its chunk
  std::int64_t backward_ns = 0;  ///< likewise
  std::int64_t bytes = 0;        ///< of gradients; the halves of an all-reduce move (dp-1)/dp of it each
  bool zero1 = false;            ///< with DpSync::kEarly: this one as in kZero1
};

/// The highest ClusterModel::toll_ns at some bandwidth: of a second of sending, 0.9 may delay computing. With 1.0, what
/// is sent meanwhile would delay it for ever.
inline double most_toll_ns(double bandwidth) { return 0.9e9 / bandwidth; }

/// What a training step costs: computation, network and data-parallel traffic. Per-chunk vectors have
/// Shape::num_chunks() entries. Rank = replica * pp + stage.
struct ClusterModel {
  int dp = 1;                          ///< replicas
  Hosts hosts;                         ///< of every rank
  double bandwidth = 1e9;              ///< bytes per second of a host's network card, each way
  std::int64_t latency_ns = 0;         ///< pipeline message: end of sending until arrival; also paid within a host
  std::int64_t hop_latency_ns = 0;     ///< the same for a hop of the ring (dp-1 per collective) and of the norm
  std::int64_t slice_bytes = 1 << 20;  ///< a data-parallel transfer may be paused every so many bytes
  bool preempt = true;                 ///< pipeline messages first; else first come, first served, bucket by bucket
  HoldRule::Options rule;              ///< patience of the two kinds of traffic
  DpSync dp_sync = DpSync::kZero1;
  /// 1: kZero1, kEarly: a step's gradients are taken at the end of the next step, and travel under all of it.
  int gradient_delay = 0;
  int early_gathers = -1;  ///< kEarly, kUnvoted: gathers that a stage may begin before its last reduce-scatter is
                           ///< done; -1 = whenever the network is idle
  /// kEarly, kUnvoted: for every stage its early buckets (numbered from 0 in forward order over the stage's chunks,
  /// zero1 ones included) in the order of their gathers; each begins when it is reduced and the one before it has left.
  /// Empty: the simulator chooses as it goes, and returns what it chose.
  std::vector<std::vector<int>> gather_order;
  int layers_per_bucket = 1;   ///< 0 = one bucket per chunk; only without `buckets`
  std::int64_t bucket_ns = 0;  ///< from the turn of a reduce-scatter or gather to its first byte
  std::int64_t action_ns = 0;  ///< added to every compute action

  std::vector<std::int64_t> forward_ns;   ///< one micro-batch
  std::vector<std::int64_t> backward_ns;  ///< one micro-batch; I and W of a split backward take half each
  bool halves = true;  ///< backwards may run in halves; else an I takes all of one, and its W nothing
  /// The part of the last chunk's backward that is its head's: that of its forward, where a backward does not follow it
  /// at once (core/passes/head.h).
  std::int64_t head_ns = 0;
  /// The parts of these in which the rank waits for TP.sync, its stage's own link's; empty = 0.
  std::vector<std::int64_t> forward_tp_ns;
  std::vector<std::int64_t> backward_tp_ns;
  /// Bytes per second of the messages over each border between chunks, forward and backward, where they are known by
  /// themselves; empty: `bandwidth`.
  std::vector<double> forward_links;
  std::vector<double> backward_links;
  /// Nanoseconds that a rank computes longer for each byte that it sends meanwhile: of its host's card, the ranks of
  /// the host share them.
  double toll_ns = 0;
  std::vector<std::int64_t> activation_bytes;  ///< what a chunk sends to the next for one micro-batch, and gets back
  /// Optimizer: all of the chunk's gradients on one rank; empty = 0. It runs before the chunk's first forward; for
  /// zero1 buckets a replica updates its share of 1/dp right after the norm, before anything else, and then gathers.
  std::vector<std::int64_t> update_ns;
  /// What a stash of every chunk copies to the pool, and back, where the schedule has its OFFLOAD; empty: copies are
  /// free. `copy_bandwidth`: bytes per second of each direction; of both together where copies share.
  std::vector<std::int64_t> stash_bytes;
  double copy_bandwidth = 25e9;
  bool copies_share = false;
  /// Of every chunk. Empty: cut from `layers`, equal shares of the chunk's times and `gradient_bytes`.
  std::vector<std::vector<BucketModel>> buckets;
  std::vector<int> layers;
  std::vector<std::int64_t> gradient_bytes;

  /// Throws std::invalid_argument naming the entry, its value and what is accepted.
  void check(const Shape& shape) const;

  /// Replicas that have to be simulated. Where the placement repeats itself on other hosts every r replicas, all
  /// blocks of r replicas do the same at the same time, and what the last of a block sends to the next block is
  /// what its first gets from the previous one: r replicas tell everything.
  int distinct_replicas(int pp) const;

  int host_of(int rank) const { return core::host_of(hosts, rank); }
};

}  // namespace fold3d::core
