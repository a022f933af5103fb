#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/arbiter/nic_arbiter.h"
#include "comm/ring/ring_connection.h"

namespace fold3d::comm {

/// A planned failure of one member, for tests.
struct RingFault {
  enum class Call : std::uint8_t { kSend, kRecv };
  enum class Mode : std::uint8_t {
    kThrow,  ///< the call throws
    kStop,   ///< like a stopped process: from then on no call of this member ends until its own abort()
  };
  int rank = 0;
  NicArbiter::Traffic traffic = NicArbiter::Traffic::kReduce;
  Call call = Call::kSend;
  Mode mode = Mode::kThrow;
  int after = 0;  ///< how many such calls succeed before
};

struct RingLoopbackOptions {
  int size = 2;
  std::size_t capacity = 1u << 16;         ///< bytes that fit between two members, >= 1
  std::chrono::microseconds max_delay{0};  ///< some calls wait for a random time up to this before they begin
  std::uint64_t seed = 0;                  ///< of those times
  std::vector<RingFault> faults = {};
};

/// Joins the members of a ring that are threads of one process, for tests: streams of bytes with room for some, as TCP
/// has. A member that aborts closes its connections: calls that need it throw CommError, once what it sent is used up.
class RingLoopback {
 public:
  explicit RingLoopback(RingLoopbackOptions options);
  ~RingLoopback();

  /// One line of one member. May outlive the RingLoopback.
  std::shared_ptr<RingConnection> connection(int rank, NicArbiter::Traffic traffic);

 private:
  class Pipe;
  class Link;
  const RingLoopbackOptions options_;
  std::vector<std::shared_ptr<Pipe>> pipes_;  // [traffic * size + rank]: from the rank to the next
};

}  // namespace fold3d::comm
