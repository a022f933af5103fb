// BucketSync: sums, gathers and their order over loopback rings and TCP, replicas = threads.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/bucket/collective_ring.h"
#include "harness/ring_harness.h"

namespace fold3d::test {
namespace {

using namespace std::chrono_literals;
using comm::BucketSync;
using comm::NicArbiter;

template <class Value>
void expect_equal(const std::vector<Value>& got, const std::vector<Value>& wanted, const std::string& what) {
  if (got != wanted) throw std::runtime_error("wrong values: " + what);
}

void expect_clean(const Replicas& replicas, const std::function<void(int, BucketSync&)>& body) {
  for (const std::string& error : replicas.run(body)) EXPECT_EQ(error, "");
}

/// Reduces and gathers one bucket of `shard` elements per replica.
template <class Value>
void all_reduce(const Replicas& replicas, std::size_t shard, double scale) {
  const std::size_t count = shard * static_cast<std::size_t>(replicas.size);
  expect_clean(replicas, [&](int rank, BucketSync& sync) {
    const TestBucket<Value> bucket(0, contents<Value>(rank, 0, 1, count));
    sync.begin(1, {0});
    sync.reduce(bucket.collective(scale));
    sync.wait_reduced(0);
    sync.wait_gathered(0);
    const std::string what = "size " + std::to_string(replicas.size) + ", shard of " + std::to_string(shard);
    for (int owner = 0; owner < replicas.size; ++owner) {
      expect_equal(bucket.shard(owner, replicas.size), reduced<Value>(owner, replicas.size, 0, 1, count, scale), what);
    }
  });
}

TEST(BucketSync, SumsToTheBitWhateverTheSizesAndTheTiming) {
  for (int size = 2; size <= 5; ++size) {
    for (const std::size_t shard : {1u, 7u, 64u, 65u, 1000u}) {
      all_reduce<float>({.size = size}, shard, 1.0 / size);
      all_reduce<double>({.size = size, .loopback = {.capacity = 100, .max_delay = 100us, .seed = shard}}, shard, 0.3);
    }
  }
}

TEST(BucketSync, SumsOverTcp) {
  for (int size = 2; size <= 4; ++size) {
    all_reduce<float>({.size = size, .slice_bytes = 0, .over_tcp = true}, 300'001, 1.0);
    all_reduce<float>({.size = size, .slice_bytes = 1 << 12, .over_tcp = true}, 10'000, 1.0);
    // The same bits on several lines.
    const int lines = comm::TcpRingPeers::kMostLines;
    all_reduce<float>({.size = size, .slice_bytes = 0, .over_tcp = true, .lines = lines}, 300'001, 0.3);
  }
}

TEST(BucketSync, SlicesOfDifferentSizesMeet) {  // each replica cuts what it sends as it likes
  const int size = 3;
  const std::size_t count = 3 * 1000;
  std::atomic<int> correct{0};
  comm::RingLoopback loop({.size = size});
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      auto arbiter = std::make_shared<NicArbiter>();
      const auto ring = [&](NicArbiter::Traffic traffic) {
        return std::make_unique<comm::CollectiveRing>(
            comm::Ring::Options{.rank = rank,
                                .size = size,
                                .traffic = traffic,
                                .credits = std::make_shared<comm::Credits>(64u << (2 * rank))},
            std::vector{loop.connection(rank, traffic)}, arbiter);
      };
      BucketSync sync({.timeout = 60s, .name = "r", .size = size}, arbiter, ring(NicArbiter::Traffic::kReduce),
                      ring(NicArbiter::Traffic::kGather));
      const TestBucket<float> bucket(0, contents<float>(rank, 0, 1, count));
      sync.begin(1, {0});
      sync.reduce(bucket.collective());
      sync.wait_reduced(0);
      sync.wait_gathered(0);
      if (bucket.shard(0, size) == reduced<float>(0, size, 0, 1, count, 1.0)) ++correct;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(correct.load(), size);
}

TEST(BucketSync, GathersRunInTheirOrderThoughBucketsAreReducedInAnother) {
  const std::vector<int> order = {2, 0, 3};
  expect_clean({.size = 3, .loopback = {.max_delay = 200us}}, [&](int rank, BucketSync& sync) {
    std::vector<TestBucket<double>> buckets;
    for (int b = 0; b < 4; ++b) buckets.emplace_back(b, contents<double>(rank, b, 1, 300));
    sync.begin(1, order);
    for (int b = 3; b >= 0; --b) sync.reduce(buckets[static_cast<std::size_t>(b)].collective());
    sync.wait_reduced(1);
    sync.gather(buckets[1].collective());  // behind the early ones, even if those have not begun
    for (int b = 0; b < 4; ++b) sync.wait_gathered(b);
    std::vector<int> gathered;
    for (const comm::CollectiveRecord& record : sync.take_records()) {
      if (record.traffic == NicArbiter::Traffic::kGather) gathered.push_back(record.bucket);
    }
    expect_equal(gathered, {2, 0, 3, 1}, "order of the gathers");
    for (int b = 0; b < 4; ++b) {
      for (int owner = 0; owner < 3; ++owner) {
        expect_equal(buckets[static_cast<std::size_t>(b)].shard(owner, 3), reduced<double>(owner, 3, b, 1, 300, 1.0),
                     "bucket " + std::to_string(b));
      }
    }
  });
}

TEST(BucketSync, GathersMayStillRunInTheNextStep) {
  expect_clean({.size = 2, .loopback = {.max_delay = 300us}}, [](int rank, BucketSync& sync) {
    for (std::int64_t step = 1; step <= 5; ++step) {
      std::vector<TestBucket<float>> buckets;
      for (int b = 0; b < 3; ++b) buckets.emplace_back(b, contents<float>(rank, b, step, 200));
      sync.begin(step, {0, 1, 2});
      for (int b = 2; b >= 0; --b) {
        sync.wait_gathered(b);  // of the step before
        sync.reduce(buckets[static_cast<std::size_t>(b)].collective());
      }
      for (int b = 0; b < 3; ++b) sync.wait_reduced(b);
      for (int b = 0; b < 3; ++b) {
        expect_equal(buckets[static_cast<std::size_t>(b)].shard(rank, 2), reduced<float>(rank, 2, b, step, 200, 1.0),
                     "step " + std::to_string(step));
      }
    }
    for (int b = 0; b < 3; ++b) sync.wait_gathered(b);
    EXPECT_TRUE(sync.is_gathered(0));
  });
}

TEST(BucketSync, AGatherBeginsOnceItsBucketIsReduced) {  // also where the next step has begun
  expect_clean({.size = 3, .loopback = {.max_delay = 300us}}, [](int rank, BucketSync& sync) {
    std::vector<TestBucket<double>> buckets;
    for (int b = 0; b < 4; ++b) buckets.emplace_back(b, contents<double>(rank, b, 1, 300));
    for (const int step : {1, 2}) {
      sync.begin(step, {});
      for (const int b : {2 * step - 1, 2 * step - 2}) sync.reduce(buckets[static_cast<std::size_t>(b)].collective());
      for (const int b : {2 * step - 2, 2 * step - 1}) sync.gather(buckets[static_cast<std::size_t>(b)].collective());
    }
    sync.wait_reduced(0, 1);
    sync.wait_reduced(2);
    for (int b = 0; b < 4; ++b) {
      sync.wait_gathered(b);
      for (int owner = 0; owner < 3; ++owner) {
        expect_equal(buckets[static_cast<std::size_t>(b)].shard(owner, 3), reduced<double>(owner, 3, b, 1, 300, 1.0),
                     "bucket " + std::to_string(b));
      }
    }
    std::vector<int> gathered;
    for (const comm::CollectiveRecord& record : sync.take_records()) {
      if (record.traffic == NicArbiter::Traffic::kGather) gathered.push_back(record.bucket);
    }
    expect_equal(gathered, {0, 1, 2, 3}, "order of the gathers");
    EXPECT_THROW(sync.wait_reduced(0), std::logic_error);
    EXPECT_THROW(sync.wait_reduced(0, 2), std::logic_error);
  });
}

TEST(BucketSync, GathersAnyElement) {
  expect_clean({.size = 2}, [](int rank, BucketSync& sync) {
    std::vector<std::uint16_t> values(1000, static_cast<std::uint16_t>(rank + 1));
    const TestBucket<std::uint16_t> bucket(4, values);
    sync.begin(1, {});
    sync.gather(bucket.collective());
    sync.wait_gathered(4);
    expect_equal(bucket.shard(0, 2), std::vector<std::uint16_t>(500, 1), "shard 0");
    expect_equal(bucket.shard(1, 2), std::vector<std::uint16_t>(500, 2), "shard 1");
  });
}

TEST(BucketSync, RecordsTellEachCollectiveOnce) {
  expect_clean({.size = 3}, [](int rank, BucketSync& sync) {
    const TestBucket<float> bucket(5, contents<float>(rank, 5, 1, 300));
    sync.begin(1, {5});
    sync.reduce(bucket.collective());
    sync.wait_gathered(5);
    const auto records = sync.take_records();
    ASSERT_EQ(records.size(), 2u);
    for (const comm::CollectiveRecord& record : records) {
      EXPECT_EQ(record.bucket, 5);
      EXPECT_EQ(record.bytes, 2 * 100 * sizeof(float));
      EXPECT_LE(record.start_ns, record.end_ns);
      EXPECT_GT(record.start_ns, 0);
    }
    EXPECT_EQ(records[0].traffic, NicArbiter::Traffic::kReduce);
    EXPECT_LE(records[0].end_ns, records[1].end_ns);
    EXPECT_TRUE(sync.take_records().empty());
  });
}

TEST(BucketSync, AWaitLooksMeanwhileWhetherItIsWantedElsewhere) {  // as by Ctrl-C
  struct Interrupted {};
  comm::RingLoopback loop({.size = 2});
  auto arbiter = std::make_shared<NicArbiter>();
  const auto ring = [&](NicArbiter::Traffic traffic) {
    return std::make_unique<comm::CollectiveRing>(
        comm::Ring::Options{.size = 2, .traffic = traffic, .credits = std::make_shared<comm::Credits>(0)},
        std::vector{loop.connection(0, traffic)}, arbiter);
  };
  int looks = 0;
  const auto interrupt = [&looks] {
    if (++looks == 2) throw Interrupted();
  };
  BucketSync sync({.timeout = 60s, .name = "r", .size = 2, .while_waiting = interrupt}, arbiter,
                  ring(NicArbiter::Traffic::kReduce), ring(NicArbiter::Traffic::kGather));
  const TestBucket<float> bucket(0, contents<float>(0, 0, 1, 8));
  sync.begin(1, {});
  sync.reduce(bucket.collective());  // the other replica does not come
  EXPECT_THROW(sync.wait_reduced(0), Interrupted);
  EXPECT_EQ(looks, 2);
}

TEST(BucketSync, RefusesWhatContradictsThePlan) {
  expect_clean({.size = 2}, [](int rank, BucketSync& sync) {
    const TestBucket<float> bucket(0, contents<float>(rank, 0, 1, 8));
    EXPECT_THROW(sync.reduce(bucket.collective()), std::logic_error);  // before begin()
    EXPECT_THROW(sync.begin(1, {1, 1}), std::invalid_argument);
    sync.begin(1, {0});
    EXPECT_THROW(sync.wait_reduced(0), std::logic_error);  // never handed over
    EXPECT_THROW(sync.begin(2, {}), std::logic_error);     // its gather would never come
    const TestBucket<float> odd(0, std::vector<float>(7));
    EXPECT_THROW(sync.reduce(odd.collective()), std::invalid_argument);
    const TestBucket<std::uint16_t> half(0, std::vector<std::uint16_t>(8));
    EXPECT_THROW(sync.reduce(half.collective()), std::invalid_argument);
    sync.reduce(bucket.collective());
    sync.wait_reduced(0);
    EXPECT_THROW(sync.reduce(bucket.collective()), std::logic_error);  // twice
    sync.wait_gathered(0);
    EXPECT_THROW(sync.begin(1, {}), std::logic_error);
  });
}

}  // namespace
}  // namespace fold3d::test
