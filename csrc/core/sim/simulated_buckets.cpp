#include "core/sim/simulated_buckets.h"

#include <algorithm>

namespace fold3d::core {
namespace {

/// Equal shares of a chunk's layers: the cut of a model that is described by layers only.
std::vector<BucketModel> cut_layers(const ClusterModel& model, int chunk) {
  const int layers = model.layers[static_cast<std::size_t>(chunk)];
  const std::int64_t bytes = model.gradient_bytes[static_cast<std::size_t>(chunk)];
  const int size = model.layers_per_bucket == 0 ? layers : model.layers_per_bucket;
  std::vector<BucketModel> parts;
  for (int first = 0; first < layers; first += size) {
    const int end = std::min(layers, first + size);
    parts.push_back({end - first, end - first, bytes * end / layers - bytes * first / layers, false});
  }
  return parts;
}

/// whole * part / total without overflow; 0 of 0 is all of it.
std::int64_t share(std::int64_t whole, std::int64_t part, std::int64_t total) {
  if (total == 0) return whole;
  const std::int64_t each = whole / total;
  return each * part + static_cast<std::int64_t>(static_cast<long double>(whole % total) *
                                                 static_cast<long double>(part) / static_cast<long double>(total));
}

}  // namespace

std::int64_t SimulatedBuckets::produced_after(int number, std::int64_t duration) const {
  return share(duration, (*this)[number].backward_part, (*this)[number].backward_total);
}

SimulatedBuckets::SimulatedBuckets(const Shape& shape, const ClusterModel& model)
    : shape_(shape), dp_(model.dp), stages_(static_cast<std::size_t>(shape.pp)) {
  for (int chunk = 0; chunk < shape.num_chunks(); ++chunk) {
    first_.push_back(size());
    if (model.buckets.empty()) {
      add_chunk(model, chunk, cut_layers(model, chunk));
    } else {
      add_chunk(model, chunk, model.buckets[static_cast<std::size_t>(chunk)]);
    }
  }
  first_.push_back(size());
}

void SimulatedBuckets::add_chunk(const ClusterModel& model, int chunk, const std::vector<BucketModel>& parts) {
  const auto at = static_cast<std::size_t>(chunk);
  std::vector<int>& stage = stages_[static_cast<std::size_t>(shape_.stage_of(chunk))];
  const std::int64_t update = model.update_ns.empty() ? 0 : model.update_ns[at];
  std::int64_t forward = 0;
  std::int64_t backward = 0;
  std::int64_t bytes = 0;
  for (const BucketModel& part : parts) {
    forward += part.forward_ns;
    backward += part.backward_ns;
    bytes += part.bytes;
  }
  BucketModel before;
  for (const BucketModel& part : parts) {
    Bucket bucket;
    bucket.chunk = chunk;
    bucket.local = static_cast<int>(stage.size());
    bucket.forward_begin = before.forward_ns == 0 ? 0 : share(model.forward_ns[at], before.forward_ns, forward);
    bucket.forward_end = share(model.forward_ns[at], before.forward_ns + part.forward_ns, forward);
    bucket.backward_part = backward - before.backward_ns;
    bucket.backward_total = backward;
    bucket.bytes = part.bytes;
    bucket.update_ns = bytes == 0 ? 0 : share(update, part.bytes, bytes);
    const bool may_differ = model.dp_sync == DpSync::kEarly;
    bucket.zero1 = model.dp_sync == DpSync::kZero1 || (may_differ && part.zero1);
    bucket.early = model.dp_sync == DpSync::kUnvoted || (may_differ && !part.zero1);
    before.forward_ns += part.forward_ns;
    before.backward_ns += part.backward_ns;
    stage.push_back(size());
    buckets_.push_back(bucket);
  }
}

}  // namespace fold3d::core
