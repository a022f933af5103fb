#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/arbiter/nic_arbiter.h"
#include "comm/tcp/tcp_ring_peers.h"
#include "comm/tensor/tensor_sync.h"
#include "core/network/hosts.h"
#include "harness/rank_threads.h"
#include "loopback/ring_loopback.h"

namespace fold3d::test {

/// The ranks of a tensor-parallel group as threads of this process, each with a TensorSync.
struct TensorGroup {
  int size = 2;
  bool over_tcp = false;
  comm::RingLoopbackOptions loopback = {};  // its size is filled in
  std::chrono::milliseconds timeout{60'000};
  core::Hosts hosts = std::vector<int>(static_cast<std::size_t>(size), 0);
  std::shared_ptr<comm::NicArbiter> arbiter = std::make_shared<comm::NicArbiter>();

  /// Runs `body` on a thread for each rank; returns the texts of their errors, or empty ones.
  std::vector<std::string> run(const std::function<void(int rank, comm::TensorSync& sync)>& body) const {
    comm::RingLoopbackOptions options = loopback;
    options.size = size;
    comm::RingLoopback loop(options);
    std::vector<std::unique_ptr<comm::TcpRingPeers>> peers;
    for (int rank = 0; over_tcp && rank < size; ++rank) {
      peers.push_back(std::make_unique<comm::TcpRingPeers>(rank, size, "127.0.0.1", std::string(32, 't'), "group",
                                                           comm::TcpRingPeers::Members::kTensorParallel));
    }
    return run_on_threads(size, [&](int rank) {
      std::shared_ptr<comm::RingConnection> connection;
      if (over_tcp) {
        comm::TcpRingPeers& own = *peers[static_cast<std::size_t>(rank)];
        own.connect(peers[static_cast<std::size_t>((rank + 1) % size)]->endpoint(), timeout);
        connection = own.connection(comm::NicArbiter::Traffic::kTensor);
      } else {
        connection = loop.connection(rank, comm::NicArbiter::Traffic::kReduce);
      }
      comm::TensorSync sync(
          {.rank = rank, .size = size, .hosts = hosts, .timeout = timeout, .name = "rank " + std::to_string(rank)},
          connection, arbiter);
      body(rank, sync);
    });
  }
};

template <class Value>
std::span<const std::byte> bytes_of(const std::vector<Value>& values) {
  return std::as_bytes(std::span(values));
}

template <class Value>
std::span<std::byte> writable_bytes_of(std::vector<Value>& values) {
  return std::as_writable_bytes(std::span(values));
}

}  // namespace fold3d::test
