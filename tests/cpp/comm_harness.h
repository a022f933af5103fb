#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/host_buffer.h"
#include "comm/transport_loopback.h"
#include "core/deps.h"
#include "core/schedule.h"

namespace fold3d::test {

/// A tensor of int64 in host memory.
comm::Tensor make_tensor(const std::vector<std::int64_t>& values);
std::vector<std::int64_t> values_of(const comm::Tensor& tensor);

/// One rank of a run: walks its list of a lowered schedule like the Executor, with made-up contents that name
/// where they come from, so that any mix-up shows. Sizes vary: empty, inline, and larger than a frame.
class TestRank {
 public:
  struct Settings {
    comm::Options options;
    int dp = 1;
    int dp_rank = 0;
    std::uint64_t seed = 0;  // of contents and sizes; the same on all ranks
    int max_compute_us = 0;  // random time of a compute action
  };

  TestRank(std::unique_ptr<comm::Transport> transport, Settings settings);

  /// One step. Throws what the communicator throws; std::runtime_error if anything that arrives is wrong.
  void step(const core::Schedule& schedule, int step_index);

  comm::Communicator& communicator() { return communicator_; }

 private:
  comm::Tensors contents(const core::Action& send, int step_index) const;
  void check(const core::Action& recv, const comm::Tensors& tensors, int step_index) const;
  std::int64_t gradient(int dp_rank, int chunk, int micro_batch, int step_index) const;
  void check_reduced(int chunk, const core::Schedule& schedule, const comm::Tensor& tensor, int step_index) const;
  void compute(const core::Action& action);

  Settings settings_;
  std::uint64_t random_;
  comm::Communicator communicator_;
};

struct RunSetup {
  std::vector<core::Schedule> schedules =
      {};  // of the same pp; step k runs the k-th, again from the front after the last
  comm::LoopbackOptions loopback = {};
  comm::Options options = {};  // shape and stage are filled in
  int steps = 1;
  int max_compute_us = 0;
  bool over_tcp = false;  // messages over TcpLinks, sums over the loopback transport
};

/// What became of each rank, dp-major: the text of its error, or empty.
std::vector<std::string> run_ranks(const RunSetup& run);

/// A lowered schedule by name, with REDUCE.
core::Schedule lowered(const std::string& name, int pp, int segments, int micro_batches, int group_size = 0);

/// Its forward part, as evaluation runs it.
core::Schedule lowered_evaluation(const std::string& name, int pp, int segments, int micro_batches);

}  // namespace fold3d::test
