#include "core/sim/cluster_model.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <stdexcept>

namespace fold3d::core {
namespace {

constexpr double kLongestCopy = 1000;  // seconds: sums of nanoseconds stay far from overflowing

[[noreturn]] void refuse(const std::string& name, const std::string& value, const std::string& wanted) {
  throw std::invalid_argument("cluster model: " + name + " is " + value + "; it must be " + wanted);
}

template <class T>
void check_chunks(const char* name, const std::vector<T>& values, const Shape& shape, T least) {
  if (values.size() != static_cast<std::size_t>(shape.num_chunks())) {
    refuse(name, std::to_string(values.size()) + " numbers long",
           "one number for each of the " + std::to_string(shape.num_chunks()) + " chunks of " + to_string(shape));
  }
  for (std::size_t chunk = 0; chunk < values.size(); ++chunk) {
    if (values[chunk] < least) {
      refuse(name + ("[" + std::to_string(chunk)) + "]", std::to_string(values[chunk]),
             "at least " + std::to_string(least));
    }
  }
}

/// What is part of `whole`, chunk by chunk.
void check_parts(const char* name, const std::vector<std::int64_t>& parts, const std::vector<std::int64_t>& whole,
                 const Shape& shape) {
  if (parts.empty()) return;
  check_chunks<std::int64_t>(name, parts, shape, 0);
  for (std::size_t chunk = 0; chunk < parts.size(); ++chunk) {
    if (parts[chunk] > whole[chunk]) {
      refuse(name + ("[" + std::to_string(chunk)) + "]", std::to_string(parts[chunk]),
             "part of the " + std::to_string(whole[chunk]) + " ns that the chunk takes");
    }
  }
}

void check_buckets(const std::vector<std::vector<BucketModel>>& buckets, const Shape& shape) {
  if (buckets.size() != static_cast<std::size_t>(shape.num_chunks())) {
    refuse("buckets", std::to_string(buckets.size()) + " lists long",
           "one list for each of the " + std::to_string(shape.num_chunks()) + " chunks of " + to_string(shape));
  }
  for (std::size_t chunk = 0; chunk < buckets.size(); ++chunk) {
    for (const BucketModel& bucket : buckets[chunk]) {
      const std::int64_t least = std::min({bucket.forward_ns, bucket.backward_ns, bucket.bytes});
      if (least < 0) refuse("a number of buckets[" + std::to_string(chunk) + "]", std::to_string(least), "at least 0");
    }
  }
}

/// Whether replicas [first, first + count) sit on their hosts as replicas [0, count) do on theirs, host for host.
bool same_placement(const std::vector<int>& hosts, std::size_t first, std::size_t count) {
  std::map<int, int> there;
  std::set<int> taken;
  for (std::size_t i = 0; i < count; ++i) {
    const auto [entry, is_new] = there.emplace(hosts[i], hosts[first + i]);
    if (entry->second != hosts[first + i]) return false;
    if (is_new && !taken.insert(hosts[first + i]).second) return false;
  }
  return true;
}

bool share_a_host(const std::vector<int>& hosts, std::size_t block) {
  std::map<int, std::size_t> owner;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    if (owner.emplace(hosts[i], i / block).first->second != i / block) return true;
  }
  return false;
}

}  // namespace

std::string_view to_string(DpSync dp_sync) { return kDpSyncNames[static_cast<std::size_t>(dp_sync)]; }

DpSync parse_dp_sync(std::string_view text) {
  for (std::size_t i = 0; i < kDpSyncNames.size(); ++i) {
    if (kDpSyncNames[i] == text) return static_cast<DpSync>(i);
  }
  refuse("dp_sync", "'" + std::string(text) + "'", "zero1, early, blocking, serial or unvoted");
}

void ClusterModel::check(const Shape& shape) const {
  if (dp < 1) refuse("dp", std::to_string(dp), "at least 1");
  if (!(bandwidth > 0)) refuse("bandwidth", std::to_string(bandwidth), "positive (bytes per second)");
  if (latency_ns < 0) refuse("latency_ns", std::to_string(latency_ns), "0 or more");
  if (hop_latency_ns < 0) refuse("hop_latency_ns", std::to_string(hop_latency_ns), "0 or more");
  if (slice_bytes < 1) refuse("slice_bytes", std::to_string(slice_bytes), "at least 1");
  if (gradient_delay != 0 && gradient_delay != 1) refuse("gradient_delay", std::to_string(gradient_delay), "0 or 1");
  if (gradient_delay > 0 && dp_sync != DpSync::kZero1 && dp_sync != DpSync::kEarly) {
    refuse("gradient_delay", "1", "0 with dp_sync '" + std::string(to_string(dp_sync)) + "'");
  }
  if (early_gathers < -1) refuse("early_gathers", std::to_string(early_gathers), "-1 (no limit) or more");
  if (layers_per_bucket < 0) refuse("layers_per_bucket", std::to_string(layers_per_bucket), "0 (whole chunk) or more");
  if (!hosts.empty() && hosts.size() != static_cast<std::size_t>(dp * shape.pp)) {
    refuse("hosts", std::to_string(hosts.size()) + " numbers long",
           "empty or one host for each of the " + std::to_string(dp * shape.pp) + " ranks");
  }
  check_chunks<std::int64_t>("forward_ns", forward_ns, shape, 0);
  check_chunks<std::int64_t>("backward_ns", backward_ns, shape, 0);
  if (head_ns < 0 || head_ns > backward_ns.back()) {
    refuse("head_ns", std::to_string(head_ns),
           "part of the " + std::to_string(backward_ns.back()) + " ns of the last chunk's backward");
  }
  for (const auto* links : {&forward_links, &backward_links}) {
    if (!links->empty() && links->size() + 1 != static_cast<std::size_t>(shape.num_chunks())) {
      refuse("the list of links", std::to_string(links->size()) + " numbers long",
             "empty, or one number for each border of the " + std::to_string(shape.num_chunks()) + " chunks");
    }
    for (const double rate : *links) {
      if (!(rate > 0)) refuse("a link", std::to_string(rate), "positive (bytes per second)");
    }
  }
  if (!(toll_ns >= 0) || toll_ns > most_toll_ns(bandwidth)) {
    refuse("toll_ns", std::to_string(toll_ns), "0 or more, and less than 0.9e9 / bandwidth");
  }
  check_parts("forward_tp_ns", forward_tp_ns, forward_ns, shape);
  check_parts("backward_tp_ns", backward_tp_ns, backward_ns, shape);
  check_chunks<std::int64_t>("activation_bytes", activation_bytes, shape, 0);
  if (!update_ns.empty()) check_chunks<std::int64_t>("update_ns", update_ns, shape, 0);
  if (!stash_bytes.empty()) check_chunks<std::int64_t>("stash_bytes", stash_bytes, shape, 0);
  if (!(copy_bandwidth > 0)) refuse("copy_bandwidth", std::to_string(copy_bandwidth), "positive (bytes per second)");
  for (const std::int64_t bytes : stash_bytes) {
    if (static_cast<double>(bytes) > kLongestCopy * copy_bandwidth) {
      refuse("copy_bandwidth", std::to_string(copy_bandwidth),
             "enough to copy each stash, here " + std::to_string(bytes) + " bytes, within 1,000 s");
    }
  }
  if (buckets.empty()) {
    check_chunks<int>("layers", layers, shape, 1);
    check_chunks<std::int64_t>("gradient_bytes", gradient_bytes, shape, 0);
  } else {
    check_buckets(buckets, shape);
  }
  if (bucket_ns < 0) refuse("bucket_ns", std::to_string(bucket_ns), "0 or more");
  if (action_ns < 0) refuse("action_ns", std::to_string(action_ns), "0 or more");
  if (gather_order.empty()) return;
  if (dp_sync != DpSync::kEarly && dp_sync != DpSync::kUnvoted) {
    refuse("gather_order", "given", "left empty with dp_sync '" + std::string(to_string(dp_sync)) + "'");
  }
  if (early_gathers != -1) refuse("early_gathers", std::to_string(early_gathers), "-1 with a gather_order");
}

int ClusterModel::distinct_replicas(int pp) const {
  if (hosts.empty()) return 1;
  for (int count = 1; count < dp; ++count) {
    const auto block = static_cast<std::size_t>(count * pp);
    if (dp % count != 0 || share_a_host(hosts, block)) continue;
    bool same = true;
    for (std::size_t first = block; first < hosts.size(); first += block) {
      same = same && same_placement(hosts, first, block);
    }
    if (same) return count;
  }
  return dp;
}

}  // namespace fold3d::core
