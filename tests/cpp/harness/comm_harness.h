#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "comm/arbiter/nic_arbiter.h"
#include "comm/base/host_buffer.h"
#include "comm/p2p/communicator.h"
#include "comm/tcp/tcp_peers.h"
#include "core/ir/deps.h"
#include "core/ir/schedule.h"
#include "loopback/transport_loopback.h"

namespace fold3d::test {

/// A tensor of int64 in host memory.
comm::Tensor make_tensor(const std::vector<std::int64_t>& values);
std::vector<std::int64_t> values_of(const comm::Tensor& tensor);

/// Options of one stage of a pipeline with one segment.
comm::Options options_for(int pp, int stage, std::chrono::milliseconds timeout = std::chrono::minutes(1));

std::vector<core::Action> program(const std::vector<std::string>& texts);

/// The frame of a message.
std::vector<std::byte> frame_of(const std::string& send, std::uint32_t step, const comm::Tensors& tensors);

/// One rank of a run: walks its list of a lowered schedule like the Executor, with made-up contents that name
/// where they come from, so that any mix-up shows. Sizes vary: empty, inline, and larger than a frame.
class TestRank {
 public:
  struct Settings {
    comm::Options options;
    std::uint64_t seed = 0;  // of contents and sizes; the same on all ranks
    int max_compute_us = 0;  // random time of a compute action
    std::shared_ptr<comm::NicArbiter> arbiter = nullptr;
    /// Called by step() at a REDUCE_GRAD, and before a compute action whose messages are here.
    std::function<void(const core::Action&)> before = nullptr;
  };

  TestRank(std::unique_ptr<comm::Transport> transport, Settings settings);

  /// One step. Throws what the communicator throws; std::runtime_error if anything that arrives is wrong.
  void step(const core::Schedule& schedule, int step_index);

  comm::Communicator& communicator() { return communicator_; }

 private:
  comm::Tensors contents(const core::Action& send, int step_index) const;
  void check(const core::Action& recv, const comm::Tensors& tensors, int step_index) const;
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
  bool over_tcp = false;  // messages over TcpPeers instead of the loopback transport
};

/// The ranks of one pipeline, joined as the run wants it.
class Pipeline {
 public:
  explicit Pipeline(RunSetup run);

  /// The rank of a stage, at most once each. Over TCP it meets its neighbours, so each is made on its own thread.
  std::unique_ptr<TestRank> rank(int stage, std::shared_ptr<comm::NicArbiter> arbiter = nullptr,
                                 std::function<void(const core::Action&)> before = nullptr);

 private:
  const RunSetup run_;
  comm::Loopback loopback_;
  std::vector<std::shared_ptr<comm::TcpPeers>> links_;  // [stage]; only over TCP
};

/// What became of each rank: the text of its error, or empty.
std::vector<std::string> run_ranks(const RunSetup& run);

/// A lowered schedule by name, with REDUCE.
core::Schedule lowered(const std::string& name, int pp, int segments, int micro_batches, int group_size = 0);

/// Its forward part, as evaluation runs it.
core::Schedule lowered_evaluation(const std::string& name, int pp, int segments, int micro_batches);

/// What names a schedule.
struct ScheduleCase {
  std::string name;
  int pp, segments, micro_batches, group_size;
};

ScheduleCase random_case(std::mt19937_64& random, int least_pp, int most_pp);
core::Schedule lowered(const ScheduleCase& c);
std::string to_string(const ScheduleCase& c);

}  // namespace fold3d::test
