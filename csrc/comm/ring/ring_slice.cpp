#include "comm/ring/ring_slice.h"

#include <string>

#include "comm/base/errors.h"

namespace fold3d::comm {
namespace {

constexpr std::uint32_t kMagic = 0x46335231;  // "F3R1"; reads differently on a machine of the other byte order

std::string text(const SliceHeader& header) {
  return std::string(to_string(static_cast<NicArbiter::Traffic>(header.traffic))) + " of bucket " +
         std::to_string(header.bucket) + " in step " + std::to_string(header.step);
}

std::string size_text(const SliceHeader& header) {
  return std::to_string(header.shard_bytes) + " bytes (elements of " + std::to_string(header.element_bytes) + ")";
}

}  // namespace

SliceHeader slice_header(NicArbiter::Traffic traffic, const Collective& collective, std::size_t shard_bytes, int round,
                         std::size_t offset, std::size_t bytes) {
  return {.magic = kMagic,
          .traffic = static_cast<std::uint8_t>(traffic),
          .element = static_cast<std::uint8_t>(collective.element),
          .element_bytes = static_cast<std::uint8_t>(collective.wire_bytes()),
          .bucket = collective.bucket,
          .round = static_cast<std::uint32_t>(round),
          .step = collective.step,
          .shard_bytes = shard_bytes,
          .offset = offset,
          .bytes = bytes};
}

void check_slice(const SliceHeader& arrived, const SliceHeader& expected) {
  if (arrived.magic != kMagic) throw ProtocolError("the bytes that arrived are not the header of a slice (bad magic)");
  if (arrived.traffic > static_cast<std::uint8_t>(NicArbiter::Traffic::kGather)) {
    throw ProtocolError("the header of a slice is damaged");
  }
  if (arrived.traffic != expected.traffic || arrived.bucket != expected.bucket || arrived.step != expected.step) {
    throw ProtocolError("expected a slice of the " + text(expected) + ", got one of the " + text(arrived) +
                        "; the replicas do not run the same plan");
  }
  if (arrived.shard_bytes != expected.shard_bytes || arrived.element_bytes != expected.element_bytes ||
      arrived.element != expected.element) {
    throw ProtocolError("the " + text(expected) + " has shards of " + size_text(expected) + " here and of " +
                        size_text(arrived) + " at the sender; the replicas do not hold the same bucket");
  }
  if (arrived.round != expected.round || arrived.offset != expected.offset || arrived.bytes == 0 ||
      arrived.bytes > arrived.shard_bytes - arrived.offset || arrived.bytes % arrived.element_bytes != 0) {
    throw ProtocolError("a slice of the " + text(expected) + " does not continue the one before");
  }
}

}  // namespace fold3d::comm
