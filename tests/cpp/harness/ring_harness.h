#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/arbiter/nic_arbiter.h"
#include "comm/base/host_buffer.h"
#include "comm/bucket/bucket_sync.h"
#include "comm/ring/credits.h"
#include "comm/tcp/tcp_ring_peers.h"
#include "core/network/hosts.h"
#include "loopback/ring_loopback.h"

namespace fold3d::test {

/// The replicas of one stage as threads of this process, each with a BucketSync over two rings.
struct Replicas {
  int size = 2;
  std::size_t slice_bytes = 256;
  std::chrono::milliseconds timeout{60'000};
  comm::RingLoopbackOptions loopback = {};  // its size is filled in
  bool over_tcp = false;
  int lines = 1;  // of each ring over TCP
  comm::NicArbiter::Options gate_options = {};
  core::Hosts hosts = {};                                                // of each replica, as the rings see it
  mutable std::vector<std::shared_ptr<comm::NicArbiter>> arbiters = {};  // one for each replica, made by run()

  /// A replica's arbiter, for a body.
  std::shared_ptr<comm::NicArbiter> arbiter(int rank) const { return arbiters[static_cast<std::size_t>(rank)]; }

  /// Runs `body` on a thread for each replica; returns the texts of their errors, or empty ones.
  std::vector<std::string> run(const std::function<void(int rank, comm::BucketSync& sync)>& body) const;
};

/// The rings of one stage's replicas.
class Rings {
 public:
  explicit Rings(const Replicas& replicas);

  /// The BucketSync of a replica, at most once each. Over TCP it meets its neighbours, so each is made on its own
  /// thread.
  std::unique_ptr<comm::BucketSync> sync(int rank, const std::shared_ptr<comm::NicArbiter>& arbiter);

 private:
  const int size_, lines_;
  const std::size_t chunk_bytes_;
  const std::chrono::milliseconds timeout_;
  const core::Hosts hosts_;
  comm::RingLoopback loopback_;
  std::vector<std::unique_ptr<comm::TcpRingPeers>> tcp_;  // [replica]; only over TCP
};

/// `count` elements that depend on where they come from; sums of them in float depend on the order.
template <class Value>
std::vector<Value> contents(int rank, int bucket, std::int64_t step, std::size_t count);

/// The reduce-scattered shard `rank` of a bucket, summed in the order that Ring promises.
template <class Value>
std::vector<Value> reduced(int rank, int size, int bucket, std::int64_t step, std::size_t count, double scale);

/// A bucket in host memory.
template <class Value>
class TestBucket {
 public:
  TestBucket(int number, const std::vector<Value>& values);
  comm::Collective collective(double scale = 1.0) const;
  std::vector<Value> values() const;
  /// Shard `rank` of `size`.
  std::vector<Value> shard(int rank, int size) const;

 private:
  int number_;
  std::shared_ptr<comm::HostBuffer> buffer_;
};

}  // namespace fold3d::test
