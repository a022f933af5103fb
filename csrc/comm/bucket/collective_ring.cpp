#include "comm/bucket/collective_ring.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <span>
#include <utility>

namespace fold3d::comm {
namespace {

constexpr std::size_t kLeastShareBytes = 128u << 10;  // of a shard; less is not worth a line of its own

}  // namespace

CollectiveRing::CollectiveRing(const Ring::Options& options, std::vector<std::shared_ptr<RingConnection>> lines,
                               const std::shared_ptr<NicArbiter>& arbiter)
    : rank_(options.rank), size_(options.size), traffic_(options.traffic) {
  for (auto& line : lines) rings_.push_back(std::make_unique<Ring>(options, std::move(line), arbiter));
}

void CollectiveRing::start(CollectiveStream::Listener& listener) {
  listener_ = &listener;
  for (const auto& ring : rings_) ring->start(*this);
}

void CollectiveRing::push(Collective collective) {
  const std::span<std::byte> bytes(collective.buffer->host_data(), collective.buffer->bytes());
  const std::size_t shard_bytes = bytes.size() / static_cast<std::size_t>(size_);
  const std::span<std::byte> own = bytes.subspan(static_cast<std::size_t>(rank_) * shard_bytes, shard_bytes);
  const Split split{.length = bytes.size() / collective.element_bytes, .unit_bytes = collective.element_bytes};
  const auto shares = static_cast<int>(std::clamp(shard_bytes / kLeastShareBytes, std::size_t{1}, rings_.size()));
  const auto whole = std::make_shared<Whole>(Whole{
      .buffer = std::move(collective.buffer),
      .left = shares,
      .record = {.traffic = traffic_,
                 .bucket = collective.bucket,
                 .start_ns = std::numeric_limits<std::int64_t>::max()},
  });
  for (int share = 0; share < shares; ++share) {
    const Exchange::Operation operation{.rank = rank_,
                                        .size = size_,
                                        .number = collective.element,
                                        .share = {.index = share, .count = shares},
                                        .as_bfloat16 = collective.as_bfloat16,
                                        .scale = collective.scale,
                                        .bucket = collective.bucket,
                                        .step = collective.step};
    rings_[static_cast<std::size_t>(share)]->push(traffic_ == NicArbiter::Traffic::kReduce
                                                      ? Exchange::reduce_scatter(operation, split, bytes, own)
                                                      : Exchange::all_gather(operation, split, own, bytes),
                                                  whole);
  }
}

void CollectiveRing::abort(const std::string& reason) noexcept {
  for (const auto& ring : rings_) ring->abort(reason);
}

void CollectiveRing::stop() noexcept {
  abort("the stream was closed");
  for (const auto& ring : rings_) ring->stop();
}

std::string CollectiveRing::waits_for() const {
  for (const auto& ring : rings_) {
    if (const std::string text = ring->waits_for(); !text.empty()) return "the " + text;
  }
  return {};
}

void CollectiveRing::completed(const Ring::Record& record, const std::shared_ptr<void>& keep) {
  Whole& whole = *static_cast<Whole*>(keep.get());
  {
    const std::lock_guard lock(mutex_);
    whole.record.start_ns = std::min(whole.record.start_ns, record.start_ns);
    whole.record.end_ns = std::max(whole.record.end_ns, record.end_ns);
    whole.record.bytes += record.bytes;
    if (--whole.left > 0) return;
  }
  listener_->completed(whole.record);
}

}  // namespace fold3d::comm
