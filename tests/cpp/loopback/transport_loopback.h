#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/p2p/transport.h"

namespace fold3d::comm {

/// A planned failure of one rank, for tests.
struct Fault {
  enum class Call : std::uint8_t { kSend, kRecv };  ///< frames count as sends and receives
  enum class Mode : std::uint8_t {
    kThrow,  ///< the call throws
    kStop,   ///< like a stopped process: from then on no call of this rank ends until its own abort()
  };
  int stage = 0;
  Call call = Call::kSend;
  Mode mode = Mode::kThrow;
  int after = 0;  ///< how many such calls of the rank succeed before
};

struct LoopbackOptions {
  int pp = 1;
  std::chrono::microseconds max_delay{0};  ///< some calls wait for a random time up to this before they begin
  std::uint64_t seed = 0;                  ///< of those times
  std::vector<Fault> faults = {};
};

/// Joins the ranks of one pipeline, which are threads of one process, for tests. As on gloo and NCCL, a send ends only
/// when the receiver has posted its receive and the data is over (rendezvous), and a rank that aborts closes its
/// connections: calls that need it throw CommError with its reason, now or later. A size mismatch is an error
/// on both sides.
class Loopback {
 public:
  explicit Loopback(LoopbackOptions options);
  ~Loopback();

  /// The transport of one stage, at most once each. May outlive the Loopback. Its abort() is called by its
  /// destructor.
  std::unique_ptr<Transport> connect(int stage);

  struct Hub;

 private:
  std::shared_ptr<Hub> hub_;
};

}  // namespace fold3d::comm
