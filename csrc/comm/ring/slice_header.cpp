#include "comm/ring/slice_header.h"

#include <string>

#include "comm/base/errors.h"

namespace fold3d::comm {
namespace {

constexpr std::uint32_t kMagic = 0x46335332;  // "F3S2"; reads differently on a machine of the other byte order

std::string text(const SliceHeader& header) {
  const auto kind = static_cast<Exchange::Kind>(header.kind);
  const std::string name = header.bucket == Exchange::kNoBucket
                               ? std::string(to_string(kind)) + " " + std::to_string(header.sequence)
                               : Exchange::name_of_bucket(kind, header.bucket, header.step);
  return name + " of " + std::to_string(header.whole) + " bytes (elements of type " + std::to_string(header.number) +
         ", reduction " + std::to_string(header.reduction) + (header.as_bfloat16 ? ", as bfloat16)" : ")");
}

}  // namespace

SliceHeader slice_header(const Exchange& exchange, std::uint64_t sequence, std::size_t round, std::size_t offset,
                         std::size_t bytes) {
  const Exchange::Operation& operation = exchange.operation();
  return {.magic = kMagic,
          .kind = static_cast<std::uint8_t>(exchange.kind()),
          .number = static_cast<std::uint8_t>(operation.number),
          .reduction = static_cast<std::uint8_t>(operation.reduction),
          .as_bfloat16 = operation.as_bfloat16,
          .round = static_cast<std::uint32_t>(round),
          .bucket = operation.bucket,
          .step = operation.step,
          .sequence = sequence,
          .whole = exchange.bytes(),
          .offset = offset,
          .bytes = bytes};
}

void check_slice(const SliceHeader& arrived, const SliceHeader& expected, std::size_t left) {
  if (arrived.magic != kMagic) throw ProtocolError("the bytes that arrived are not the header of a slice (bad magic)");
  if (arrived.kind > static_cast<std::uint8_t>(Exchange::Kind::kAllGather)) {
    throw ProtocolError("the header of a slice is damaged");
  }
  const auto same = [&](auto... fields) { return ((arrived.*fields == expected.*fields) && ...); };
  using H = SliceHeader;
  if (!same(&H::kind, &H::number, &H::reduction, &H::as_bfloat16, &H::bucket, &H::step, &H::sequence, &H::whole)) {
    throw ProtocolError("expected a slice of the " + text(expected) + ", got one of the " + text(arrived) +
                        "; the ranks of the group do not run the same operations");
  }
  if (!same(&H::round, &H::offset) || arrived.bytes == 0 || arrived.bytes > left ||
      arrived.bytes % element_bytes(static_cast<Number>(arrived.number)) != 0) {
    throw ProtocolError("a slice of the " + text(expected) + " does not continue the one before");
  }
}

}  // namespace fold3d::comm
