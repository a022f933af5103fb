#include "comm/bucket/collective_ring.h"

#include <cstddef>
#include <span>
#include <utility>

namespace fold3d::comm {

CollectiveRing::CollectiveRing(const Ring::Options& options, std::shared_ptr<RingConnection> connection,
                               std::shared_ptr<NicArbiter> arbiter)
    : rank_(options.rank),
      size_(options.size),
      traffic_(options.traffic),
      ring_(options, std::move(connection), std::move(arbiter)) {}

void CollectiveRing::start(CollectiveStream::Listener& listener) {
  listener_ = &listener;
  ring_.start(*this);
}

void CollectiveRing::push(Collective collective) {
  const std::span<std::byte> whole(collective.buffer->host_data(), collective.buffer->bytes());
  const std::size_t shard_bytes = whole.size() / static_cast<std::size_t>(size_);
  const std::span<std::byte> own = whole.subspan(static_cast<std::size_t>(rank_) * shard_bytes, shard_bytes);
  const Split split{.length = whole.size() / collective.element_bytes, .unit_bytes = collective.element_bytes};
  const Exchange::Operation operation{.rank = rank_,
                                      .size = size_,
                                      .number = collective.element,
                                      .as_bfloat16 = collective.as_bfloat16,
                                      .scale = collective.scale,
                                      .bucket = collective.bucket,
                                      .step = collective.step};
  ring_.push(traffic_ == NicArbiter::Traffic::kReduce ? Exchange::reduce_scatter(operation, split, whole, own)
                                                      : Exchange::all_gather(operation, split, own, whole),
             std::move(collective.buffer));
}

std::string CollectiveRing::waits_for() const {
  const std::string text = ring_.waits_for();
  return text.empty() ? text : "the " + text;
}

void CollectiveRing::completed(const Ring::Record& record) {
  listener_->completed({.traffic = traffic_,
                        .bucket = record.bucket,
                        .start_ns = record.start_ns,
                        .end_ns = record.end_ns,
                        .bytes = record.bytes});
}

}  // namespace fold3d::comm
