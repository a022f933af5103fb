#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/transport.h"

namespace fold3d::comm {

/// Element types the loopback transport can sum, with the codes of c10::ScalarType.
inline constexpr std::uint8_t kLoopbackInt64 = 4;
inline constexpr std::uint8_t kLoopbackFloat64 = 7;

/// A planned failure of one rank, for tests.
struct Fault {
  enum class Call : std::uint8_t { kSend, kRecv, kAllReduce };  ///< frames count as sends and receives
  enum class Mode : std::uint8_t {
    kThrow,  ///< the call throws
    kStop,   ///< like a stopped process: from then on no call of this rank ends until its own abort()
  };
  int dp_rank = 0;
  int stage = 0;
  Call call = Call::kSend;
  Mode mode = Mode::kThrow;
  int after = 0;  ///< how many such calls of the rank succeed before
};

struct LoopbackOptions {
  int dp = 1;
  int pp = 1;
  std::chrono::microseconds max_delay{0};  ///< some calls wait for a random time up to this before they begin
  std::uint64_t seed = 0;                  ///< of those times
  std::vector<Fault> faults = {};
};

/// Joins dp x pp ranks that are threads of one process, for tests. As on gloo and NCCL, a send ends only when
/// the receiver has posted its receive and the data is over (rendezvous), and a rank that aborts closes its
/// connections: calls that need it throw CommError with its reason, now or later. A size mismatch is an error
/// on both sides.
class Loopback {
 public:
  explicit Loopback(LoopbackOptions options);
  ~Loopback();

  /// The transport of one rank, at most once each. May outlive the Loopback. Its abort() is called by its
  /// destructor.
  std::unique_ptr<Transport> connect(int dp_rank, int stage);

  struct Hub;

 private:
  std::shared_ptr<Hub> hub_;
};

}  // namespace fold3d::comm
