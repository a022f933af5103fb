// A replica fails, stops or runs another plan: every replica ends with an error that tells the cause; strangers are
// kept out.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <future>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/base/errors.h"
#include "comm/ring/slice_header.h"
#include "comm/tcp/tcp_ring_peers.h"
#include "harness/ring_harness.h"
#include "harness/stranger.h"

namespace fold3d::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using comm::BucketSync;
using comm::RingFault;
using comm::TcpRingPeers;
using Traffic = comm::NicArbiter::Traffic;

const std::string kSecret(32, 's');

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// Three steps of three buckets, the first and the last gathered early.
void three_steps(int rank, int size, BucketSync& sync) {
  const std::size_t count = 60 * static_cast<std::size_t>(size);
  std::vector<TestBucket<float>> buckets;
  for (int b = 0; b < 3; ++b) buckets.emplace_back(b, contents<float>(rank, b, 0, count));
  for (std::int64_t step = 1; step <= 3; ++step) {
    sync.begin(step, {0, 2});
    for (int b = 2; b >= 0; --b) {
      sync.wait_gathered(b);
      sync.reduce(buckets[static_cast<std::size_t>(b)].collective());
    }
    for (int b = 0; b < 3; ++b) sync.wait_reduced(b);
    sync.gather(buckets[1].collective());
  }
  for (int b = 0; b < 3; ++b) sync.wait_gathered(b);
}

Replicas random_replicas(std::mt19937_64& random, RingFault::Mode mode) {
  const int size = 2 + static_cast<int>(random() % 3);
  return {.size = size,
          .slice_bytes = 64u << random() % 3,
          .loopback = {.capacity = 1u << (4 + random() % 8),
                       .max_delay = std::chrono::microseconds(random() % 2 * 100),
                       .seed = random(),
                       .faults = {{.rank = static_cast<int>(random() % static_cast<unsigned>(size)),
                                   .traffic = static_cast<Traffic>(random() % 2),
                                   .call = static_cast<RingFault::Call>(random() % 2),
                                   .mode = mode,
                                   .after = static_cast<int>(random() % 6)}}}};
}

TEST(RingFaults, AnExceptionInALinkEndsEveryReplica) {
  const auto begin = Clock::now();
  for (int index = 0; index < 60; ++index) {
    std::mt19937_64 random(static_cast<std::uint64_t>(index));
    const Replicas replicas = random_replicas(random, RingFault::Mode::kThrow);
    const auto errors = replicas.run([&](int rank, BucketSync& sync) { three_steps(rank, replicas.size, sync); });
    int causes = 0;
    for (const std::string& error : errors) {
      EXPECT_NE(error, "") << "run " << index;
      causes += has(error, "injected failure") ? 1 : 0;
      EXPECT_TRUE(has(error, "injected failure") || has(error, "lost the connection to replica")) << error;
    }
    EXPECT_EQ(causes, 1) << "run " << index;
  }
  EXPECT_LT(Clock::now() - begin, 50s);  // nobody had to wait for a time-out
}

TEST(RingFaults, ASilentStopIsATimeoutThatNamesTheReplica) {
  for (int index = 0; index < 4; ++index) {
    std::mt19937_64 random(100 + static_cast<std::uint64_t>(index));
    Replicas replicas = random_replicas(random, RingFault::Mode::kStop);
    replicas.timeout = 400ms;
    const auto begin = Clock::now();
    int timeouts = 0;
    for (const std::string& error :
         replicas.run([&](int rank, BucketSync& sync) { three_steps(rank, replicas.size, sync); })) {
      EXPECT_NE(error, "");
      if (!has(error, "comm_timeout")) continue;
      ++timeouts;
      EXPECT_TRUE(has(error, "waits for replica") && has(error, "bucket") && has(error, "0.400 s")) << error;
    }
    EXPECT_GE(timeouts, 1);
    EXPECT_LT(Clock::now() - begin, 10s);
  }
}

TEST(RingFaults, TheErrorNamesReplicaCollectiveAndCause) {
  const Replicas replicas{.loopback = {.faults = {{.rank = 0, .call = RingFault::Call::kSend}}}};
  // One bucket: with several, a replica may be sending the next one already when it finds the connection gone.
  const auto errors = replicas.run([](int rank, BucketSync& sync) {
    const TestBucket<float> bucket(2, contents<float>(rank, 2, 0, 120));
    sync.begin(1, {});
    sync.reduce(bucket.collective());
    sync.wait_reduced(2);
  });
  EXPECT_EQ(errors.at(0), "replica 0: reduce of bucket 2 (step 1) failed: injected failure");
  EXPECT_EQ(errors.at(1),
            "replica 1: reduce of bucket 2 (step 1) failed: lost the connection to replica 0: closed by the peer");
}

TEST(RingFaults, AReplicaThatLeavesIsALostConnection) {
  const auto errors = Replicas{.size = 3, .over_tcp = true}.run([](int rank, BucketSync& sync) {
    if (rank == 1) throw std::runtime_error("gone");
    three_steps(rank, 3, sync);
  });
  EXPECT_EQ(errors.at(1), "gone");
  EXPECT_TRUE(has(errors.at(0), "lost the connection to replica")) << errors.at(0);
  EXPECT_TRUE(has(errors.at(2), "lost the connection to replica")) << errors.at(2);
}

/// Runs one reduce on two replicas, of different buckets, steps or lengths; some replica says `parts`.
void expect_protocol_error(const std::vector<int>& bucket, const std::vector<std::int64_t>& step,
                           const std::vector<std::size_t>& count, const std::vector<std::string>& parts) {
  const auto errors = Replicas{}.run([&](int rank, BucketSync& sync) {
    const auto r = static_cast<std::size_t>(rank);
    const TestBucket<float> own(bucket[r], std::vector<float>(count[r]));
    sync.begin(step[r], {});
    sync.reduce(own.collective());
    sync.wait_reduced(bucket[r]);
  });
  bool told = false;
  for (const std::string& error : errors) {
    EXPECT_NE(error, "");
    bool all = true;
    for (const std::string& part : parts) all = all && has(error, part);
    told = told || all;
  }
  EXPECT_TRUE(told) << errors.at(0) << '\n' << errors.at(1);
}

TEST(RingFaults, AnotherPlanIsAProtocolErrorThatNamesBoth) {
  expect_protocol_error({3, 4}, {1, 1}, {8, 8}, {"the reduce of bucket 3 (step 1)", "the reduce of bucket 4 (step 1)"});
  expect_protocol_error({3, 3}, {1, 2}, {8, 8}, {"the reduce of bucket 3 (step 1)", "the reduce of bucket 3 (step 2)"});
  expect_protocol_error({3, 3}, {1, 1}, {8, 16}, {"bucket 3 (step 1)", "32 bytes", "64 bytes"});
}

TEST(RingFaults, ADamagedHeaderIsRefused) {
  std::vector<float> whole(200);
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(whole));
  const comm::Exchange exchange =
      comm::Exchange::reduce_scatter({.number = comm::Number::kFloat32, .bucket = 1, .step = 3},
                                     {.length = 200, .unit_bytes = 4}, bytes, bytes.first(400));
  const comm::SliceHeader good = comm::slice_header(exchange, 5, 0, 64, 100);
  comm::check_slice(good, good, 336);
  const auto damaged = [&](auto change) {
    comm::SliceHeader header = good;
    change(header);
    EXPECT_THROW(comm::check_slice(header, good, 336), comm::ProtocolError);
  };
  damaged([](comm::SliceHeader& h) { h.magic = 1; });
  damaged([](comm::SliceHeader& h) { h.kind = 7; });
  damaged([](comm::SliceHeader& h) { h.kind = 2; });
  damaged([](comm::SliceHeader& h) { h.number = 1; });
  damaged([](comm::SliceHeader& h) { h.reduction = 1; });
  damaged([](comm::SliceHeader& h) { h.as_bfloat16 = 1; });
  damaged([](comm::SliceHeader& h) { h.bucket = 2; });
  damaged([](comm::SliceHeader& h) { h.step = 4; });
  damaged([](comm::SliceHeader& h) { h.sequence = 6; });
  damaged([](comm::SliceHeader& h) { h.whole = 400; });
  damaged([](comm::SliceHeader& h) { h.round = 1; });
  damaged([](comm::SliceHeader& h) { h.offset = 0; });
  damaged([](comm::SliceHeader& h) { h.bytes = 0; });
  damaged([](comm::SliceHeader& h) { h.bytes = 340; });
  damaged([](comm::SliceHeader& h) { h.bytes = 1; });  // no whole element
}

TEST(RingFaults, AStrangerIsRefusedAndTheReplicaStillGetsIn) {
  TcpRingPeers first(0, 2, "127.0.0.1", kSecret), second(1, 2, "127.0.0.1", kSecret);
  const Stranger stranger(first.endpoint());
  std::thread other([&] { second.connect(first.endpoint(), 10s); });
  first.connect(second.endpoint(), 10s);
  other.join();
  EXPECT_TRUE(stranger.was_refused());
  const auto out = first.connection(Traffic::kGather), in = second.connection(Traffic::kGather);
  const std::array<std::byte, 3> sent{std::byte{1}, std::byte{2}, std::byte{3}};
  std::array<std::byte, 3> got{};
  out->send(std::span(sent).first(1), std::span(sent).subspan(1));
  in->recv(got);
  EXPECT_EQ(got, sent);
}

TEST(RingFaults, AnotherJobsSecretAndASilentReplicaAreErrors) {
  TcpRingPeers first(0, 2, "127.0.0.1", kSecret), second(1, 2, "127.0.0.1", std::string(32, 't'));
  std::thread other([&] { EXPECT_THROW(second.connect(first.endpoint(), 300ms), comm::CommError); });
  EXPECT_THROW(first.connect(second.endpoint(), 300ms), comm::CommError);
  other.join();
  TcpRingPeers third(0, 2, "127.0.0.1", kSecret), silent(1, 2, "127.0.0.1", kSecret);
  EXPECT_THROW((void)third.connection(Traffic::kReduce), std::logic_error);
  try {
    third.connect(silent.endpoint(), 200ms);
    FAIL() << "connected to nobody";
  } catch (const comm::TimeoutError& error) {
    EXPECT_TRUE(has(error.what(), "replica 1") && has(error.what(), "comm_timeout")) << error.what();
  }
  EXPECT_THROW(TcpRingPeers(1, 1, "127.0.0.1", kSecret), std::invalid_argument);
}

TEST(RingFaults, CloseInTheMiddleEndsAndWaitsThrow) {
  std::promise<void> closed;
  const auto errors = Replicas{}.run([&, other = closed.get_future().share()](int rank, BucketSync& sync) {
    const TestBucket<float> bucket(0, std::vector<float>(1000));
    sync.begin(1, {0});
    if (rank == 1) {  // never reduces; its destructor closes, but not first
      other.wait_for(10s);
      return;
    }
    sync.reduce(bucket.collective());
    sync.close();
    closed.set_value();
    EXPECT_THROW(sync.wait_reduced(0), comm::AbortedError);
    EXPECT_THROW(sync.begin(2, {}), comm::AbortedError);
    sync.close();
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"", ""}));
}

}  // namespace
}  // namespace fold3d::test
