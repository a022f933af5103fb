#include "harness/ring_harness.h"

#include <cstring>
#include <type_traits>
#include <utility>

#include "comm/bucket/collective_ring.h"
#include "harness/rank_threads.h"

namespace fold3d::test {

using Traffic = comm::NicArbiter::Traffic;

std::vector<std::string> Replicas::run(const std::function<void(int, comm::BucketSync&)>& body) const {
  Rings rings(*this);
  arbiters.clear();
  for (int r = 0; r < size; ++r) arbiters.push_back(std::make_shared<comm::NicArbiter>("", gate_options));
  return run_on_threads(size, [&](int rank) {
    const auto sync = rings.sync(rank, arbiter(rank));
    body(rank, *sync);
  });
}

Rings::Rings(const Replicas& replicas)
    : size_(replicas.size),
      lines_(replicas.lines),
      chunk_bytes_(replicas.slice_bytes),
      timeout_(replicas.timeout),
      hosts_(replicas.hosts),
      loopback_([&] {
        comm::RingLoopbackOptions options = replicas.loopback;
        options.size = replicas.size;
        return options;
      }()) {
  for (int r = 0; replicas.over_tcp && r < size_; ++r) {
    tcp_.push_back(std::make_unique<comm::TcpRingPeers>(r, size_, "127.0.0.1", std::string(32, 'r')));
  }
}

std::unique_ptr<comm::BucketSync> Rings::sync(int rank, const std::shared_ptr<comm::NicArbiter>& arbiter) {
  comm::TcpRingPeers* const tcp = tcp_.empty() ? nullptr : tcp_[static_cast<std::size_t>(rank)].get();
  if (tcp != nullptr) tcp->connect(tcp_[static_cast<std::size_t>((rank + 1) % size_)]->endpoint(), timeout_);
  const auto credits = std::make_shared<comm::Credits>(chunk_bytes_, lines_);
  const auto ring = [&](Traffic traffic) {
    std::vector<std::shared_ptr<comm::RingConnection>> lines;
    for (int line = 0; tcp != nullptr && line < lines_; ++line) lines.push_back(tcp->connection(traffic, line));
    if (tcp == nullptr) lines.push_back(loopback_.connection(rank, traffic));
    return std::make_unique<comm::CollectiveRing>(
        comm::Ring::Options{.rank = rank, .size = size_, .traffic = traffic, .hosts = hosts_, .credits = credits},
        std::move(lines), arbiter);
  };
  return std::make_unique<comm::BucketSync>(
      comm::BucketSync::Options{.timeout = timeout_, .name = "replica " + std::to_string(rank), .size = size_}, arbiter,
      ring(Traffic::kReduce), ring(Traffic::kGather));
}

template <class Value>
std::vector<Value> contents(int rank, int bucket, std::int64_t step, std::size_t count) {
  std::vector<Value> values(count);
  std::uint64_t state = static_cast<std::uint64_t>(rank) * 7919 + static_cast<std::uint64_t>(bucket) * 104729 +
                        static_cast<std::uint64_t>(step) * 1299709 + 1;
  for (Value& value : values) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    const auto mantissa = static_cast<double>(state >> 40) / 16777216.0;
    value = static_cast<Value>((mantissa - 0.5) * static_cast<double>(1 << (state >> 36 & 15)));
  }
  return values;
}

template <class Value>
std::vector<Value> reduced(int rank, int size, int bucket, std::int64_t step, std::size_t count, double scale) {
  const std::size_t shard = count / static_cast<std::size_t>(size);
  const std::size_t offset = static_cast<std::size_t>(rank) * shard;
  std::vector<Value> sum(shard);
  for (int k = 1; k <= size; ++k) {
    const std::vector<Value> part = contents<Value>((rank + k) % size, bucket, step, count);
    for (std::size_t i = 0; i < shard; ++i) sum[i] = k == 1 ? part[offset + i] : sum[i] + part[offset + i];
  }
  for (Value& value : sum) value *= static_cast<Value>(scale);
  return sum;
}

template <class Value>
TestBucket<Value>::TestBucket(int number, const std::vector<Value>& values)
    : number_(number), buffer_(std::make_shared<comm::HostBuffer>(values.size() * sizeof(Value))) {
  std::memcpy(buffer_->host_data(), values.data(), buffer_->bytes());
}

template <class Value>
comm::Collective TestBucket<Value>::collective(double scale) const {
  comm::Number element = comm::Number::kOther;
  if (std::is_same_v<Value, float>) element = comm::Number::kFloat32;
  if (std::is_same_v<Value, double>) element = comm::Number::kFloat64;
  return {.step = 0,
          .bucket = number_,
          .buffer = buffer_,
          .element_bytes = sizeof(Value),
          .element = element,
          .scale = scale};
}

template <class Value>
std::vector<Value> TestBucket<Value>::values() const {
  std::vector<Value> out(buffer_->bytes() / sizeof(Value));
  std::memcpy(out.data(), buffer_->host_data(), buffer_->bytes());
  return out;
}

template <class Value>
std::vector<Value> TestBucket<Value>::shard(int rank, int size) const {
  const std::size_t bytes = buffer_->bytes() / static_cast<std::size_t>(size);
  std::vector<Value> out(bytes / sizeof(Value));  // nothing else is read: a gather may still be writing there
  std::memcpy(out.data(), buffer_->host_data() + static_cast<std::size_t>(rank) * bytes, bytes);
  return out;
}

template std::vector<float> contents<float>(int, int, std::int64_t, std::size_t);
template std::vector<double> contents<double>(int, int, std::int64_t, std::size_t);
template std::vector<float> reduced<float>(int, int, int, std::int64_t, std::size_t, double);
template std::vector<double> reduced<double>(int, int, int, std::int64_t, std::size_t, double);
template class TestBucket<float>;
template class TestBucket<double>;
template class TestBucket<std::uint16_t>;

}  // namespace fold3d::test
