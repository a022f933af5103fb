#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/tensor/exchange.h"

namespace fold3d::comm {

/// What goes before every slice of a TP.sync. The sender decides how long slices are; the receiver checks that what
/// arrives is what comes next in its own list.
struct ExchangeHeader {
  std::uint32_t magic = 0;
  std::uint8_t kind = 0;  // Exchange::Kind
  std::uint8_t number = 0;
  std::uint8_t reduction = 0;
  std::uint8_t unused = 0;
  std::uint32_t round = 0;
  std::uint32_t bytes = 0;     // of the slice
  std::uint64_t sequence = 0;  // which exchange of the group this is
  std::uint64_t whole = 0;     // bytes of the whole tensor
  std::uint64_t offset = 0;    // in the round
};

ExchangeHeader header_of(const Exchange& exchange, std::uint64_t sequence, std::size_t round, std::size_t offset,
                         std::size_t bytes);

/// Throws ProtocolError when `arrived` is not a slice that begins where `expected` begins, or is longer than
/// `left`. `expected.bytes` does not matter.
void check_header(const ExchangeHeader& arrived, const ExchangeHeader& expected, std::size_t left);

}  // namespace fold3d::comm
