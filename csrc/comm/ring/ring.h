#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "comm/arbiter/nic_arbiter.h"
#include "comm/ring/collective_stream.h"
#include "comm/ring/credits.h"
#include "comm/ring/ring_connection.h"
#include "core/network/hosts.h"

namespace fold3d::comm {

/// Collectives in host memory over a ring of replicas, as in Patarasuk and Yuan, "Bandwidth optimal all-reduce
/// algorithms for clusters of workstations" (2009): in each of size - 1 rounds a replica sends a shard to the next one
/// and receives one from the previous.
///
/// Shards travel in slices. A byte of round s may be sent as soon as the same byte of round s - 1 was received, and
/// sending runs into the next collective while this one still receives, so a row of buckets keeps the line busy. Before
/// each slice the sender, and before each payload the receiver, asks the arbiter whether something more urgent wants
/// the card; not where the replica at the other end is on the same host.
///
/// The order of a sum is fixed: shard k is summed from replica k + 1 around the ring to its owner k, whose addition
/// comes last and multiplies by the scale. So results do not depend on time or slice size, to the bit. What travels as
/// bfloat16 is rounded for each journey and added in float32: of n replicas n - 1 roundings, and one of the result.
///
/// Two threads of its own: one sends, one receives.
class Ring final : public CollectiveStream {
 public:
  struct Options {
    int rank = 0;                                                ///< replica, [0, size)
    int size = 2;                                                ///< replicas of the stage, >= 2
    NicArbiter::Traffic traffic = NicArbiter::Traffic::kReduce;  ///< reduce-scatters or all-gathers
    core::Hosts hosts = {};                                      ///< of each replica
  };

  /// Throws std::invalid_argument for options out of range.
  Ring(const Options& options, std::shared_ptr<RingConnection> connection, std::shared_ptr<NicArbiter> arbiter,
       std::shared_ptr<Credits> credits);
  ~Ring() override;

  void start(Listener& listener) override;
  void push(Collective collective) override;
  void abort(const std::string& reason) noexcept override;
  void stop() noexcept override;
  std::string waits_for() const override;

 private:
  /// A collective under way. Its bytes are those that travel. `sent` and `received` count them over all rounds; guarded
  /// by mutex_, the rest is fixed.
  struct Job {
    Collective collective;
    std::size_t shard_bytes = 0;
    std::size_t total_bytes = 0;  // (size - 1) * shard_bytes, each way
    std::size_t sent = 0;
    std::size_t received = 0;
    std::int64_t start_ns = 0;
  };

  /// Where in a collective a slice lies.
  struct Place {
    int round = 0;
    std::size_t offset = 0;  // in the shard
    std::span<std::byte> bytes;
  };

  void send_loop();
  void recv_loop();
  void send_slice(const Job& job, std::size_t position, std::size_t length);
  std::size_t recv_slice(Job& job, std::size_t position);
  void recv_payload(const Job& job, std::span<std::byte> target, std::size_t length, int round);
  void measured(bool window_ended);
  Place place(const Job& job, std::size_t position, std::size_t length, int first_shard) const;
  Job& job(std::uint64_t number) { return jobs_[static_cast<std::size_t>(number - first_)]; }
  std::size_t sendable(const Job& job) const;
  void begin(Job& job);
  void finish(std::unique_lock<std::mutex>& lock);
  void guard(void (Ring::*loop)(), const std::uint64_t& number) noexcept;
  void fail(Failure::Kind kind, const std::uint64_t& number, const std::string& cause) noexcept;
  int next() const { return (options_.rank + 1) % options_.size; }
  int previous() const { return (options_.rank + options_.size - 1) % options_.size; }

  const Options options_;
  const bool sends_by_card_, receives_by_card_;
  const std::shared_ptr<RingConnection> connection_;
  const std::shared_ptr<NicArbiter> arbiter_;
  const std::shared_ptr<Credits> credits_;
  Listener* listener_ = nullptr;
  std::vector<std::byte> received_;  // receiver: a slice to be added or widened
  std::vector<std::byte> rounded_;   // sender: a slice as it travels
  BandwidthMeter meter_;             // sender
  std::int64_t urgent_ = 0;          // sender: how often something more urgent wanted the card
  FlightLimit flight_;               // sender
  std::uint64_t window_ = 0;         // sender: what the next member is to grant
  std::uint64_t granted_ = 0;        // receiver: what was granted to the previous one

  mutable std::mutex mutex_;
  std::condition_variable may_send_, may_recv_;
  std::deque<Job> jobs_;       // oldest first; references stay valid while others are pushed
  std::uint64_t first_ = 0;    // number of jobs_.front()
  std::uint64_t sending_ = 0;  // number of the job that is sent
  std::uint64_t receiving_ = 0;
  bool stopped_ = false;

  std::thread sender_, receiver_;
};

}  // namespace fold3d::comm
