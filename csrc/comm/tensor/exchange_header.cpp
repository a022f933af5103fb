#include "comm/tensor/exchange_header.h"

#include <string>

#include "comm/base/errors.h"

namespace fold3d::comm {
namespace {

constexpr std::uint32_t kMagic = 0x46335331;  // "F3S1"; reads differently on a machine of the other byte order

std::string text(const ExchangeHeader& header) {
  const auto kind = static_cast<Exchange::Kind>(header.kind);
  return std::string(to_string(kind)) + " " + std::to_string(header.sequence) + " of " + std::to_string(header.whole) +
         " bytes (elements of type " + std::to_string(header.number) + ", reduction " +
         std::to_string(header.reduction) + ")";
}

}  // namespace

ExchangeHeader header_of(const Exchange& exchange, std::uint64_t sequence, std::size_t round, std::size_t offset,
                         std::size_t bytes) {
  return {.magic = kMagic,
          .kind = static_cast<std::uint8_t>(exchange.kind()),
          .number = static_cast<std::uint8_t>(exchange.operation().number),
          .reduction = static_cast<std::uint8_t>(exchange.operation().reduction),
          .unused = 0,
          .round = static_cast<std::uint32_t>(round),
          .bytes = static_cast<std::uint32_t>(bytes),
          .sequence = sequence,
          .whole = exchange.bytes(),
          .offset = offset};
}

void check_header(const ExchangeHeader& arrived, const ExchangeHeader& expected, std::size_t left) {
  if (arrived.magic != kMagic) throw ProtocolError("the bytes that arrived are not the header of a slice (bad magic)");
  if (arrived.kind > static_cast<std::uint8_t>(Exchange::Kind::kAllGather)) {
    throw ProtocolError("the header of a slice is damaged");
  }
  if (arrived.kind != expected.kind || arrived.sequence != expected.sequence || arrived.whole != expected.whole ||
      arrived.number != expected.number || arrived.reduction != expected.reduction) {
    throw ProtocolError("expected a slice of the " + text(expected) + ", got one of the " + text(arrived) +
                        "; the ranks of the group do not run the same operations");
  }
  if (arrived.round != expected.round || arrived.offset != expected.offset || arrived.bytes == 0 ||
      arrived.bytes > left || arrived.bytes % element_bytes(static_cast<Number>(arrived.number)) != 0) {
    throw ProtocolError("a slice of the " + text(expected) + " does not continue the one before");
  }
}

}  // namespace fold3d::comm
