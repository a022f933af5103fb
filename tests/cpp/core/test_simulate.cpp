// The simulator of training steps against closed forms.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>

#include "core/generators/registry.h"
#include "core/ir/timeline.h"
#include "core/passes/lower.h"
#include "core/sim/simulate.h"

namespace fold3d::core {
namespace {

constexpr std::int64_t kForward = 1'000'000;
constexpr std::int64_t kBackward = 2'000'000;
constexpr int kLayers = 2;
constexpr DpSync kAll[] = {DpSync::kZero1, DpSync::kEarly, DpSync::kBlocking, DpSync::kSerial, DpSync::kUnvoted};

/// Chunks of equal cost; 1 GB/s, so that a byte takes a nanosecond.
ClusterModel even(const Shape& shape, int dp, std::int64_t gradient_bytes, std::int64_t activation_bytes) {
  const auto chunks = static_cast<std::size_t>(shape.num_chunks());
  ClusterModel model;
  model.dp = dp;
  model.bandwidth = 1e9;
  model.slice_bytes = 10'000;
  model.forward_ns.assign(chunks, kForward);
  model.backward_ns.assign(chunks, kBackward);
  model.layers.assign(chunks, kLayers);
  model.activation_bytes.assign(chunks, activation_bytes);
  model.gradient_bytes.assign(chunks, gradient_bytes);
  return model;
}

std::int64_t makespan(const Schedule& schedule, double send = 0) {
  return std::llround(unit_timeline(schedule, {kForward, kBackward, send}).makespan);
}

template <class Check>
void for_each_case(Check check) {
  for (const SchedulerInfo& info : registry()) {
    for (const int pp : {1, 2, 4}) {
      for (const int segments : {1, 2, 4}) {
        for (const int m : {1, 3, 8}) {
          if (info.allows(segments)) check(generate(info.name, {{pp, segments, m}, 0, ""}), info.name);
        }
      }
    }
  }
}

/// By how much the last stage of a V begins and ends later than the first one, in which a forward takes 1 ms.
std::int64_t late_start(const Shape& shape) {
  return shape.style == Style::kV ? (shape.pp - 1) * std::int64_t{1'000'000} : 0;
}

/// How often a micro-batch leaves a rank: once each way for every neighbour of a chunk that lives elsewhere.
int ways_out(const Shape& shape, int rank) {
  int ways = 0;
  for (int chunk = 0; chunk < shape.num_chunks(); ++chunk) {
    if (shape.stage_of(chunk) != rank) continue;
    ways += chunk + 1 < shape.num_chunks() && shape.stage_of(chunk + 1) != rank;
    ways += chunk > 0 && shape.stage_of(chunk - 1) != rank;
  }
  return ways;
}

TEST(CoreSimulate, WithoutBytesTheStepIsTheMakespan) {
  for_each_case([](const Schedule& schedule, const std::string& name) {
    for (const DpSync dp_sync : kAll) {
      ClusterModel model = even(schedule.shape, 2, 0, 0);
      model.dp_sync = dp_sync;
      const TrainingStep step = simulate_step(schedule, model);
      EXPECT_EQ(step.step_ns, makespan(schedule)) << name << " " << to_string(schedule.shape);
      EXPECT_TRUE(step.steady);
      // In a V the last stage begins last and ends last: where nobody meets, the next step begins before that end.
      EXPECT_LE(step.limit_ns, step.step_ns);
      EXPECT_GE(step.limit_ns, step.step_ns - late_start(schedule.shape)) << name << " " << to_string(schedule.shape);
    }
  });
}

TEST(CoreSimulate, UncontendedMessagesCostTheirTime) {
  // 1F1B with messages so small that none waits for another: each hop takes bytes / bandwidth + latency.
  const Schedule schedule = generate("1f1b", {{4, 1, 6}, 0, ""});
  ClusterModel model = even(schedule.shape, 1, 0, 5'000);
  model.latency_ns = 7'000;
  model.hop_latency_ns = 3'000;
  const TrainingStep step = simulate_step(schedule, model);
  // The first forward waits for the norm: two hops up the tree and two down.
  const std::int64_t norm = 2 * 2 * model.hop_latency_ns;
  EXPECT_EQ(step.step_ns, makespan(schedule, 12'000) + norm);
  EXPECT_EQ(step.ranks[1].pp_bytes, 2 * 6 * 5'000);
  EXPECT_EQ(step.ranks[0].exposed_pp_ns, makespan(schedule, 12'000) - makespan(schedule));
}

TEST(CoreSimulate, SerialIsMakespanPlusAllReduce) {
  for_each_case([](const Schedule& schedule, const std::string& name) {
    constexpr std::int64_t kGradients = 4'000'000;
    ClusterModel model = even(schedule.shape, 4, kGradients, 0);
    model.dp_sync = DpSync::kSerial;
    const TrainingStep step = simulate_step(schedule, model);
    const std::int64_t all_reduce = kGradients * schedule.shape.segments * 2 * 3 / 4;
    const std::int64_t longest = makespan(schedule) + all_reduce;
    EXPECT_LE(step.step_ns, longest) << name << " " << to_string(schedule.shape);
    EXPECT_GE(step.step_ns, longest - late_start(schedule.shape)) << name << " " << to_string(schedule.shape);
    EXPECT_EQ(step.ranks[0].exposed_dp_ns, all_reduce);
    EXPECT_EQ(step.ranks[0].hidden_dp_ns, 0);
    EXPECT_EQ(step.ranks[0].dp_bytes, all_reduce);
  });
}

TEST(CoreSimulate, SaturatedLinkTakesBytesOverBandwidth) {
  // So many gradient bytes that computing is nothing: every way of DP.sync is bound by the card, and never beats it.
  const Schedule schedule = generate("aiao", {{2, 4, 4}, 0, ""});
  constexpr std::int64_t kGradients = 400'000'000;
  for (const DpSync dp_sync : kAll) {
    ClusterModel model = even(schedule.shape, 2, kGradients, 0);
    model.dp_sync = dp_sync;
    const TrainingStep step = simulate_step(schedule, model);
    EXPECT_GE(step.step_ns, 4 * kGradients);
    EXPECT_LE(step.step_ns, 4 * kGradients + makespan(schedule)) << to_string(dp_sync);
    EXPECT_EQ(step.limit_ns, 4 * kGradients);
  }
}

TEST(CoreSimulate, NeverBelowTheLimitAndBytesAreConserved) {
  for_each_case([](const Schedule& schedule, const std::string& name) {
    for (const DpSync dp_sync : kAll) {
      for (const std::int64_t gradients : {1'000'003, 9'999'999}) {
        ClusterModel model = even(schedule.shape, 3, gradients, 300'001);
        model.dp_sync = dp_sync;
        model.latency_ns = model.hop_latency_ns = 1'000;
        const TrainingStep step = simulate_step(schedule, model);
        const std::string what = name + " " + to_string(schedule.shape) + " " + std::string(to_string(dp_sync));
        EXPECT_GE(step.step_ns, step.limit_ns) << what;
        const Shape& shape = schedule.shape;
        for (int rank = 0; rank < shape.pp; ++rank) {
          const RankBreakdown& account = step.ranks[static_cast<std::size_t>(rank)];
          EXPECT_EQ(account.compute_ns + account.bubble_ns + account.exposed_pp_ns + account.exposed_dp_ns,
                    step.step_ns);
          EXPECT_GE(account.exposed_pp_ns, 0) << what;
          // Within the rounding of each bucket's share.
          EXPECT_NEAR(static_cast<double>(account.dp_bytes), static_cast<double>(gradients) * shape.segments * 4 / 3,
                      2.0 * kLayers * shape.segments)
              << what;
          EXPECT_EQ(account.pp_bytes, ways_out(shape, rank) * shape.micro_batches * 300'001) << what;
        }
      }
    }
  });
}

TEST(CoreSimulate, HidingNeverLosesAgainstSerial) {
  for_each_case([](const Schedule& schedule, const std::string& name) {
    ClusterModel model = even(schedule.shape, 2, 5'000'000, 0);
    model.dp_sync = DpSync::kSerial;
    const std::int64_t serial = simulate_step(schedule, model).step_ns;
    for (const DpSync dp_sync : kAll) {
      model.dp_sync = dp_sync;
      EXPECT_LE(simulate_step(schedule, model).step_ns, serial) << name << " " << to_string(dp_sync);
    }
  });
}

TEST(CoreSimulate, OneRankOverlapsAsComputedByHand) {
  // One stage, two segments of one layer, one micro-batch: F0 F1 B1 B0 of 1, 1, 2, 2 ms; 2 ms each half of a bucket.
  const Schedule schedule = generate("aiao", {{1, 2, 1}, 0, ""});
  ClusterModel model = even(schedule.shape, 2, 4'000'000, 0);
  model.layers.assign(2, 1);
  // Reduce-scatters end at 6 (under B0) and 8; norm; gathers of chunk 0 until 10 and chunk 1 until 12 ms. The next
  // step: F0 10-11, F1 12-13, B1 -15, B0 -17: 17 - 6 = 11.
  model.dp_sync = DpSync::kZero1;
  EXPECT_EQ(simulate_step(schedule, model).step_ns, 11'000'000);
  // Early without a limit begins the gather of chunk 1 at 6 ms, where there is no idle network time: chunk 0 comes
  // after it. None early: the order of zero1.
  model.dp_sync = DpSync::kEarly;
  EXPECT_EQ(simulate_step(schedule, model).step_ns, 12'000'000);
  model.early_gathers = 0;
  EXPECT_EQ(simulate_step(schedule, model).step_ns, 11'000'000);
  model.early_gathers = 1;
  // Half the bytes: reduce-scatters 4-5 and 6-7 ms. Early gathers chunk 1 at 5-6, chunk 0 at 7-8: F0 8-9, F1 9-10.
  model.gradient_bytes.assign(2, 2'000'000);
  const TrainingStep early = simulate_step(schedule, model);
  EXPECT_EQ(early.step_ns, 8'000'000);
  EXPECT_EQ(early.early_gathers, 1);
  // Two of the four milliseconds of traffic are hidden.
  EXPECT_EQ(early.ranks[0].exposed_dp_ns, 2'000'000);
  EXPECT_EQ(early.ranks[0].hidden_dp_ns, 2'000'000);
  // zero1 gathers chunk 0 at 7-8, chunk 1 at 8-9: also hidden under F0.
  model.dp_sync = DpSync::kZero1;
  EXPECT_EQ(simulate_step(schedule, model).step_ns, 8'000'000);
}

TEST(CoreSimulate, MessagesWaitForAtMostOneChunk) {
  for (const char* name : {"aiao", "interleaved"}) {
    const Schedule schedule = generate(name, {{2, 4, 8}, 0, ""});
    ClusterModel model = even(schedule.shape, 2, 16'000'000, 5'000);
    model.dp_sync = DpSync::kEarly;
    const TrainingStep preemptive = simulate_step(schedule, model);
    EXPECT_GT(preemptive.preemptions, 0);
    // One chunk takes 10 us; two messages of 5 us may leave a stage at the same time.
    EXPECT_LE(preemptive.longest_message_wait_ns, 10'000 + 5'000);
    model.preempt = false;
    const TrainingStep plain = simulate_step(schedule, model);
    EXPECT_GT(plain.longest_message_wait_ns, 1'000'000);
    EXPECT_GT(plain.mean_message_wait_ns, 10 * preemptive.mean_message_wait_ns);
    EXPECT_LE(preemptive.step_ns, plain.step_ns);
  }
}

TEST(CoreSimulate, RanksOfOneHostShareItsCard) {
  const Schedule schedule = generate("gpipe", {{2, 1, 2}, 0, ""});
  ClusterModel model = even(schedule.shape, 2, 100'000'000, 1'000);
  model.dp_sync = DpSync::kSerial;
  const std::int64_t apart = simulate_step(schedule, model).step_ns;
  model.hosts = {0, 0, 1, 1};  // a replica per host: both stages' gradients through one card, no messages
  EXPECT_EQ(model.distinct_replicas(2), 1);
  const TrainingStep shared = simulate_step(schedule, model);
  EXPECT_EQ(shared.ranks[0].pp_bytes, 0);
  EXPECT_NEAR(static_cast<double>(shared.step_ns - apart), 1e8, 2e7);
  model.hosts = {0, 1, 0, 1};  // a stage per host: DP.sync within the host
  EXPECT_EQ(model.distinct_replicas(2), 2);
  const TrainingStep inside = simulate_step(schedule, model);
  EXPECT_EQ(inside.ranks[0].dp_bytes, 0);
  EXPECT_EQ(inside.ranks[3].pp_bytes, 2 * 1'000);
}

TEST(CoreSimulate, BlocksOfReplicasTellTheWholeRing) {
  const Schedule schedule = generate("aiao", {{2, 2, 4}, 0, ""});
  ClusterModel model = even(schedule.shape, 4, 8'000'000, 2'000);
  model.dp_sync = DpSync::kEarly;
  const std::int64_t one = simulate_step(schedule, model).step_ns;
  // Host numbers 0..7 in another order of stages: no shorter block looks like the others... but all are alike.
  model.hosts = {0, 1, 2, 3, 4, 5, 6, 7};
  EXPECT_EQ(model.distinct_replicas(2), 1);
  EXPECT_EQ(simulate_step(schedule, model).step_ns, one);
  // Two replicas per host, in two hosts: one of two hops leaves each host.
  model.hosts = {0, 0, 0, 0, 1, 1, 1, 1};
  EXPECT_EQ(model.distinct_replicas(2), 2);
  const TrainingStep pairs = simulate_step(schedule, model);
  EXPECT_EQ(pairs.ranks.size(), 4u);
  EXPECT_EQ(pairs.ranks[0].dp_bytes, 0);
  EXPECT_EQ(pairs.ranks[2].dp_bytes, 2 * 8'000'000 * 2 * 3 / 4);
  // The same, with one replica placed apart: everything is simulated.
  model.hosts = {0, 0, 0, 0, 1, 1, 2, 2};
  EXPECT_EQ(model.distinct_replicas(2), 4);
  EXPECT_EQ(simulate_step(schedule, model).ranks.size(), 8u);
}

TEST(CoreSimulate, SameInputSameOutput) {
  const Schedule schedule = generate("interleaved", {{4, 4, 9}, 0, ""});
  ClusterModel model = even(schedule.shape, 2, 7'654'321, 123'456);
  model.latency_ns = model.hop_latency_ns = 4'321;
  model.dp_sync = DpSync::kEarly;
  const SimulationOptions options{8, true, true};
  const TrainingStep first = simulate_step(schedule, model, options);
  const TrainingStep second = simulate_step(schedule, model, options);
  EXPECT_EQ(first.step_ns, second.step_ns);
  ASSERT_EQ(first.spans.size(), second.spans.size());
  for (std::size_t i = 0; i < first.spans.size(); ++i) {
    EXPECT_EQ(first.spans[i].action, second.spans[i].action);
    EXPECT_EQ(first.spans[i].start_ns, second.spans[i].start_ns);
  }
  // Lowering changes nothing, spans lie inside the step, and no rank computes two things at once.
  EXPECT_EQ(simulate_step(lower(schedule, {.reduce = true}), model).step_ns, first.step_ns);
  std::vector<std::int64_t> free(4, 0);
  for (const SimulatedSpan& span : first.spans) {
    EXPECT_GE(span.start_ns, 0);
    EXPECT_LE(span.end_ns, first.step_ns);
    if (span.lane != SimulatedSpan::Lane::kCompute) continue;
    auto& until = free[static_cast<std::size_t>(span.rank)];
    EXPECT_GE(span.start_ns, until);
    until = span.end_ns;
  }
}

TEST(CoreSimulate, BackwardsThatDoNotRunInHalvesGainNothingWhereTheyAreSplit) {
  for (const int pp : {2, 4}) {
    for (const int m : {4, 8}) {
      const Schedule split = generate("zb_h1", {{pp, 1, m}, 0, ""});
      ClusterModel model = even(split.shape, 1, 0, 0);
      const std::int64_t in_halves = simulate_step(split, model).step_ns;
      model.halves = false;
      const TrainingStep whole = simulate_step(split, model);
      const std::int64_t plain = makespan(generate("1f1b", {{pp, 1, m}, 0, ""}));
      EXPECT_LT(in_halves, plain);
      EXPECT_GE(whole.step_ns, plain);
      for (const RankBreakdown& rank : whole.ranks) EXPECT_EQ(rank.compute_ns, m * (kForward + kBackward));
    }
  }
}

TEST(CoreSimulate, SplitBackwardsProduceTheirBucketsInW) {
  const Schedule schedule = parse_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n");
  ClusterModel model = even(schedule.shape, 2, 2'000'000, 0);
  model.dp_sync = DpSync::kSerial;
  EXPECT_EQ(simulate_step(schedule, model).step_ns, makespan(schedule) + 2'000'000);
}

/// The buckets that layers_per_bucket = 1 would cut, written out.
void write_out_buckets(ClusterModel& model) {
  for (std::size_t chunk = 0; chunk < model.layers.size(); ++chunk) {
    const std::int64_t layers = model.layers[chunk];
    const std::int64_t bytes = model.gradient_bytes[chunk];
    auto& parts = model.buckets.emplace_back();
    for (std::int64_t layer = 0; layer < layers; ++layer) {
      parts.push_back({1, 1, bytes * (layer + 1) / layers - bytes * layer / layers, false});
    }
  }
}

TEST(CoreSimulate, WrittenOutBucketsAreTheCutOnes) {
  for_each_case([](const Schedule& schedule, const std::string& name) {
    for (const DpSync dp_sync : kAll) {
      ClusterModel model = even(schedule.shape, 2, 1'234'567, 10'000);
      model.dp_sync = dp_sync;
      const std::int64_t cut = simulate_step(schedule, model).step_ns;
      write_out_buckets(model);
      model.layers.clear();
      model.gradient_bytes.clear();
      EXPECT_EQ(simulate_step(schedule, model).step_ns, cut) << name << " " << to_string(dp_sync);
    }
  });
}

TEST(CoreSimulate, TheReturnedGatherOrderIsAsFast) {
  for_each_case([](const Schedule& schedule, const std::string& name) {
    for (const int early : {-1, 0, 2}) {
      ClusterModel model = even(schedule.shape, 2, 3'000'000, 10'000);
      model.dp_sync = DpSync::kEarly;
      model.early_gathers = early;
      write_out_buckets(model);
      model.buckets.front().front().zero1 = true;
      const TrainingStep free = simulate_step(schedule, model);
      ASSERT_EQ(free.gather_order.size(), static_cast<std::size_t>(schedule.shape.pp));
      EXPECT_EQ(free.gather_order[0].size(), static_cast<std::size_t>(kLayers * schedule.shape.segments - 1));
      model.early_gathers = -1;
      model.gather_order = free.gather_order;
      const TrainingStep planned = simulate_step(schedule, model);
      // With a limit, the planned gathers may begin earlier than the limit let them.
      const std::string what = name + " " + to_string(schedule.shape) + " " + std::to_string(early);
      if (early == -1) {
        EXPECT_EQ(planned.step_ns, free.step_ns) << what;
      }
      EXPECT_LE(planned.step_ns, free.step_ns) << what;
      EXPECT_EQ(planned.gather_order, free.gather_order);
    }
  });
}

TEST(CoreSimulate, PlannedGathersWaitForTheirPredecessors) {
  // As in OneRankOverlapsAsComputedByHand, half the bytes: reduce-scatters of chunk 1 at 4-5, of chunk 0 at 6-7 ms.
  const Schedule schedule = generate("aiao", {{1, 2, 1}, 0, ""});
  ClusterModel model = even(schedule.shape, 2, 2'000'000, 0);
  model.layers.assign(2, 1);
  model.dp_sync = DpSync::kEarly;
  model.gather_order = {{1, 0}};
  EXPECT_EQ(simulate_step(schedule, model).step_ns, 8'000'000);
  // Chunk 0 first: 7-8, then chunk 1 at 8-9 under F0.
  model.gather_order = {{0, 1}};
  const TrainingStep forward = simulate_step(schedule, model);
  EXPECT_EQ(forward.step_ns, 8'000'000);
  EXPECT_EQ(forward.early_gathers, 0);
  EXPECT_EQ(forward.gather_order, (std::vector<std::vector<int>>{{0, 1}}));
}

TEST(CoreSimulate, EachBucketMayHaveItsOwnMode) {
  const Schedule schedule = generate("aiao", {{2, 4, 8}, 0, ""});
  ClusterModel model = even(schedule.shape, 2, 20'000'000, 5'000);
  const std::int64_t zero1 = simulate_step(schedule, model).step_ns;
  model.dp_sync = DpSync::kEarly;
  const std::int64_t early = simulate_step(schedule, model).step_ns;
  EXPECT_LT(early, zero1);
  write_out_buckets(model);
  for (auto& parts : model.buckets) {
    for (BucketModel& part : parts) part.zero1 = true;
  }
  EXPECT_EQ(simulate_step(schedule, model).step_ns, zero1);
  for (std::size_t chunk = 4; chunk < 8; ++chunk) {
    for (BucketModel& part : model.buckets[chunk]) part.zero1 = false;
  }
  const TrainingStep mixed = simulate_step(schedule, model);
  EXPECT_LT(mixed.step_ns, zero1);
  EXPECT_EQ(mixed.gather_order[1].size(), 4u);
}

TEST(CoreSimulate, UpdatesAndOverheadsTakeTheirTime) {
  for_each_case([](const Schedule& schedule, const std::string& name) {
    // One stage at a time computes in closed form; with more, only the sum on a rank is known.
    if (schedule.shape.pp > 1) return;
    const auto actions = static_cast<std::int64_t>(schedule.ranks.front().size());
    for (const DpSync dp_sync : kAll) {
      ClusterModel model = even(schedule.shape, 4, 0, 0);
      model.dp_sync = dp_sync;
      model.action_ns = 1'000;
      model.bucket_ns = 50;  // nothing to send, so no collective either
      EXPECT_EQ(simulate_step(schedule, model).step_ns, makespan(schedule) + actions * 1'000) << name;
      model.update_ns.assign(static_cast<std::size_t>(schedule.shape.segments), 400'000);
      model.gradient_bytes.assign(static_cast<std::size_t>(schedule.shape.segments), 8);
      model.bandwidth = 1e15;  // so that bytes take no time
      model.bucket_ns = 0;
      const std::int64_t update = schedule.shape.segments * 400'000 / (dp_sync == DpSync::kZero1 ? 4 : 1);
      const TrainingStep step = simulate_step(schedule, model);
      EXPECT_EQ(step.step_ns, makespan(schedule) + actions * 1'000 + update) << name << " " << to_string(dp_sync);
      EXPECT_EQ(step.ranks[0].compute_ns, step.step_ns);
      EXPECT_EQ(step.ranks[0].exposed_dp_ns, 0);
    }
  });
  // A collective of serial DP.sync begins bucket_ns after its turn.
  const Schedule schedule = generate("gpipe", {{1, 1, 2}, 0, ""});
  ClusterModel model = even(schedule.shape, 2, 2'000'000, 0);
  model.dp_sync = DpSync::kSerial;
  model.bucket_ns = 7'000;
  // Reduce-scatters in a row; the gather of the first goes on while the second waits for its turn.
  const std::int64_t step = simulate_step(schedule, model).step_ns;
  EXPECT_GE(step, makespan(schedule) + 2'000'000 + 2 * 7'000);
  EXPECT_LE(step, makespan(schedule) + 2'000'000 + 4 * 7'000);
}

TEST(CoreSimulate, BadInputIsRefusedWithItsName) {
  const Schedule schedule = generate("1f1b", {{2, 1, 2}, 0, ""});
  const auto message = [&](auto change) -> std::string {
    ClusterModel model = even(schedule.shape, 2, 1, 1);
    change(model);
    try {
      simulate_step(schedule, model);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message([](ClusterModel&) {}), "");
  EXPECT_NE(message([](ClusterModel& m) { m.dp = 0; }).find("dp is 0"), std::string::npos);
  EXPECT_NE(message([](ClusterModel& m) { m.bandwidth = 0; }).find("bandwidth"), std::string::npos);
  EXPECT_NE(message([](ClusterModel& m) { m.layers[1] = 0; }).find("layers[1] is 0"), std::string::npos);
  EXPECT_NE(message([](ClusterModel& m) { m.forward_ns.pop_back(); }).find("forward_ns is 1"), std::string::npos);
  EXPECT_NE(message([](ClusterModel& m) { m.hosts = {0}; }).find("hosts"), std::string::npos);
  EXPECT_NE(message([](ClusterModel& m) { m.bucket_ns = -1; }).find("bucket_ns is -1"), std::string::npos);
  EXPECT_NE(message([](ClusterModel& m) { m.update_ns = {1}; }).find("update_ns is 1"), std::string::npos);
  EXPECT_NE(message([](ClusterModel& m) { m.buckets = {{}}; }).find("buckets is 1"), std::string::npos);
  EXPECT_NE(message([](ClusterModel& m) { m.buckets = {{}, {{1, 1, -2}}}; }).find("buckets[1] is -2"),
            std::string::npos);
  EXPECT_NE(message([](ClusterModel& m) { m.gather_order = {{}}; }).find("dp_sync 'zero1'"), std::string::npos);
  const auto order = [&](std::vector<std::vector<int>> orders) {
    return message([&](ClusterModel& m) {
      m.dp_sync = DpSync::kEarly;
      m.gather_order = orders;
    });
  };
  EXPECT_EQ(order({{1, 0}, {0, 1}}), "");
  EXPECT_NE(order({{0, 1}}).find("each of the 2 stages"), std::string::npos);
  EXPECT_NE(order({{0, 1}, {1}}).find("each of the stage's 2"), std::string::npos);
  EXPECT_NE(order({{0, 1}, {1, 1}}).find("there twice"), std::string::npos);
  EXPECT_NE(order({{0, 2}, {1, 0}}).find("no early bucket"), std::string::npos);
  EXPECT_THROW(parse_dp_sync("lazy"), std::invalid_argument);
  for (const DpSync dp_sync : kAll) EXPECT_EQ(parse_dp_sync(to_string(dp_sync)), dp_sync);
  EXPECT_THROW(simulate_step(parse_csv("0F0\n1F0\n"), even({2, 1, 1}, 1, 0, 0)), std::invalid_argument);
  EXPECT_THROW(simulate_step(parse_csv("0F0,0B0\n1B0,1F0\n"), even({2, 1, 1}, 1, 0, 0)), std::invalid_argument);
}

}  // namespace
}  // namespace fold3d::core
