// Pipelines and the rings of their stages at the same time, the ranks of a host behind one arbiter: random schedules,
// plans, placements and delays. Every message and every sum is right to the bit, nothing hangs, and no arbiter is left
// with a message that never ended. FOLD3D_STRESS_RUNS sets the number of runs.
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "comm/arbiter/nic_arbiter.h"
#include "core/ir/schedule.h"
#include "harness/comm_harness.h"
#include "harness/rank_threads.h"
#include "harness/ring_harness.h"
#include "harness/ring_plan.h"
#include "harness/shared_name.h"
#include "harness/stress.h"

namespace fold3d::test {
namespace {

using namespace std::chrono_literals;
using comm::NicArbiter;

constexpr auto kTimeout = 30s;
constexpr auto kLimit = 60s;  // of a run: its timeouts come first
constexpr std::int64_t kForever = 600'000'000'000;

/// What all ranks of a run agree on.
struct Job {
  ScheduleCase schedule = {};
  int dp = 2;
  int steps = 1;
  std::vector<Plan> plans;  // [stage]
  std::vector<int> hosts;   // [replica * pp + stage]
};

Job random_job(std::mt19937_64& random) {
  Job job{.schedule = random_case(random, 2, 3),
          .dp = 2 + static_cast<int>(random() % 2),
          .steps = 1 + static_cast<int>(random() % 3),
          .plans = {},
          .hosts = {}};
  for (int stage = 0; stage < job.schedule.pp; ++stage) {
    job.plans.push_back(random_plan(random, job.dp));
    job.plans.back().steps = job.steps;
  }
  const int ranks = job.dp * job.schedule.pp;
  const auto hosts = 1 + random() % static_cast<unsigned>(ranks);
  for (int rank = 0; rank < ranks; ++rank) job.hosts.push_back(static_cast<int>(random() % hosts));
  return job;
}

std::string to_string(const Job& job) {
  std::string text =
      to_string(job.schedule) + " dp=" + std::to_string(job.dp) + " steps=" + std::to_string(job.steps) + " hosts=";
  for (const int host : job.hosts) text += std::to_string(host);
  return text;
}

/// In a single step no message waits for a gather, so chunks may wait for messages without end, and a wake-up that is
/// lost shows. Later steps need patience: a message may wait for a receiver that waits for weights, and these for the
/// message.
NicArbiter::Options random_patience(std::mt19937_64& random, const Job& job) {
  const std::int64_t message_ns = job.steps == 1 ? kForever : 100'000 << random() % 6;
  return {.rule = {.message_patience_ns = message_ns, .slice_patience_ns = 4 * message_ns},
          .preempt = random() % 8 != 0};
}

/// The arbiter of a host, as its ranks have it: an object for each, one state for all.
class Host {
 public:
  Host(int number, const NicArbiter::Options& options)
      : name_("stress-" + std::to_string(number)), options_(options), look_(name_.text(), kAWhile) {}

  std::shared_ptr<NicArbiter> join() {
    gates_.push_back(std::make_shared<NicArbiter>(name_.text(), options_));
    return gates_.back();
  }

  /// All ranks have joined; from here on even a run that hangs leaves nothing behind.
  void unlink() { look_.unlink(); }

  /// Whether all that was announced has ended; the ranks have closed what they had.
  bool is_at_rest() {
    return look_.hold(NicArbiter::Direction::kSend, NicArbiter::Traffic::kGather) == 0 &&
           look_.hold(NicArbiter::Direction::kReceive, NicArbiter::Traffic::kGather) == 0;
  }

  /// How often chunks gave way to messages, and gathers to reduces.
  std::pair<std::int64_t, std::int64_t> waits() const {
    std::pair<std::int64_t, std::int64_t> sum;
    for (const auto& arbiter : gates_) {
      sum.first += arbiter->counters().preemptions;
      sum.second += arbiter->counters().yields;
    }
    return sum;
  }

 private:
  static constexpr NicArbiter::Options kAWhile{
      .rule = {.message_patience_ns = 20'000'000'000, .slice_patience_ns = 20'000'000'000}};

  const SharedName name_;
  const NicArbiter::Options options_;
  NicArbiter look_;
  std::vector<std::shared_ptr<NicArbiter>> gates_;  // they take back what they announced when they go
};

/// DP.sync as the Executor has it: a slice's buckets are reduced at its REDUCE_GRAD, and what was gathered is needed
/// again by the slice's first forward of the next step.
void sync_chunk(const core::Action& action, const std::vector<int>& chunks, const std::vector<int>& buckets,
                PlannedReplica& replica) {
  const auto place = static_cast<std::size_t>(std::find(chunks.begin(), chunks.end(), action.chunk) - chunks.begin());
  for (std::size_t k = place * buckets.size() / chunks.size(); k < (place + 1) * buckets.size() / chunks.size(); ++k) {
    if (action.kind == core::Kind::kReduce) replica.reduce(buckets[k]);
    if (action.kind == core::Kind::kForward && action.micro_batch == 0) replica.collect(buckets[k]);
  }
}

/// Ranks that meet; one that fails before leaves the others to themselves.
class Meeting {
 public:
  explicit Meeting(std::barrier<>& barrier) : barrier_(barrier) {}
  ~Meeting() { barrier_.arrive_and_drop(); }
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;
  void wait() { barrier_.arrive_and_wait(); }

 private:
  std::barrier<>& barrier_;
};

/// Of `count` ranks from `first` on, `step` apart.
core::Hosts hosts_of(const Job& job, int first, int count, int step) {
  core::Hosts hosts;
  for (int k = 0; k < count; ++k) hosts.push_back(job.hosts[static_cast<std::size_t>(first + k * step)]);
  return hosts;
}

/// Runs a job; the texts of its ranks' errors, as run_on_threads() has them.
std::vector<std::string> run(const Job& job, std::mt19937_64& random, std::deque<Host>& hosts) {
  const int pp = job.schedule.pp;
  const core::Schedule schedule = lowered(job.schedule);
  const NicArbiter::Options patience = random_patience(random, job);
  for (int host = 0; host < job.dp * pp; ++host) hosts.emplace_back(host, patience);
  std::vector<std::shared_ptr<NicArbiter>> arbiters;  // [rank]
  for (const int host : job.hosts) arbiters.push_back(hosts[static_cast<std::size_t>(host)].join());
  for (Host& host : hosts) host.unlink();

  std::deque<Pipeline> pipelines;  // [replica]
  for (int replica = 0; replica < job.dp; ++replica) {
    pipelines.emplace_back(
        RunSetup{.schedules = {schedule},
                 .loopback = {.max_delay = std::chrono::microseconds(random() % 3 * 150), .seed = random()},
                 .options = {.timeout = kTimeout,
                             .receive_ahead = static_cast<int>(random() % 5),
                             .hosts = hosts_of(job, replica * pp, pp, 1)},
                 .steps = job.steps,
                 .max_compute_us = static_cast<int>(random() % 3 * 100),
                 .over_tcp = random() % 8 == 0});
  }
  std::deque<Rings> rings;  // [stage]
  for (int stage = 0; stage < pp; ++stage) {
    rings.emplace_back(Replicas{.size = job.dp,
                                .slice_bytes = random() % 4 == 0 ? 0 : 64u << random() % 6,
                                .timeout = kTimeout,
                                .loopback = {.capacity = 1u << (6 + random() % 9),
                                             .max_delay = std::chrono::microseconds(random() % 3 * 100),
                                             .seed = random()},
                                .over_tcp = random() % 8 == 0,
                                .hosts = hosts_of(job, stage, job.dp, pp)});
  }
  const std::uint64_t seed = random();
  std::barrier meeting(job.dp * pp);
  return run_on_threads(job.dp * pp, [&](int rank) {
    Meeting all_done(meeting);
    const int replica = rank / pp, stage = rank % pp;
    const auto& arbiter = arbiters[static_cast<std::size_t>(rank)];
    const Plan& plan = job.plans[static_cast<std::size_t>(stage)];
    const std::vector<int> chunks = core::reduce_order(schedule, stage);
    const auto sync = rings[static_cast<std::size_t>(stage)].sync(replica, arbiter);
    PlannedReplica planned(plan, replica, *sync, seed + static_cast<std::uint64_t>(stage * job.dp));
    const auto pipeline_rank = pipelines[static_cast<std::size_t>(replica)].rank(
        stage, arbiter, [&](const core::Action& action) { sync_chunk(action, chunks, plan.reduce_order, planned); });
    for (int step = 0; step < job.steps; ++step) {
      planned.begin();
      pipeline_rank->step(schedule, step);
      planned.end();
    }
    planned.expect_done();
    // Before anybody closes a bucket sync, which takes back what was announced and did not end.
    all_done.wait();
    if (rank == 0) {
      for (Host& host : hosts) EXPECT_TRUE(host.is_at_rest());
    }
    all_done.wait();
  });
}

TEST(GateStress, RandomPipelinesAndRingsWithRandomDelays) {
  const int runs = stress_runs(100, 40);
  std::int64_t preemptions = 0, yields = 0;
  for (int seed = 0; seed < runs; ++seed) {
    std::mt19937_64 random(static_cast<std::uint64_t>(seed));
    const Job job = random_job(random);
    const std::string what = "seed " + std::to_string(seed) + ": " + to_string(job);
    const Deadline deadline(kLimit, what);
    std::deque<Host> hosts;
    const std::vector<std::string> errors = run(job, random, hosts);
    for (int rank = 0; rank < job.dp * job.schedule.pp; ++rank) {
      EXPECT_EQ(errors[static_cast<std::size_t>(rank)], "")
          << what << ", replica " << rank / job.schedule.pp << ", stage " << rank % job.schedule.pp;
    }
    if (HasFailure()) return;
    for (Host& host : hosts) {
      preemptions += host.waits().first;
      yields += host.waits().second;
    }
    if (HasFailure()) return;
  }
  // Else the two kinds of traffic never met, and the test tested nothing.
  if (runs >= 30) {
    EXPECT_GT(preemptions, 0);
    EXPECT_GT(yields, 0);
  }
}

}  // namespace
}  // namespace fold3d::test
