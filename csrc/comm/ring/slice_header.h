#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/ring/exchange.h"

namespace fold3d::comm {

/// What goes before every slice of an exchange. The sender decides how long slices are; the receiver checks that what
/// arrives is what comes next in its own list.
struct SliceHeader {
  std::uint32_t magic = 0;
  std::uint8_t kind = 0;  // Exchange::Kind
  std::uint8_t number = 0;
  std::uint8_t reduction = 0;
  std::uint8_t as_bfloat16 = 0;
  std::uint32_t round = 0;
  std::int32_t bucket = 0;
  std::int64_t step = 0;
  std::uint64_t sequence = 0;  // which exchange of the ring this is
  std::uint64_t whole = 0;     // bytes of the whole tensor
  std::uint64_t offset = 0;    // in the round, of the tensor's bytes
  std::uint64_t bytes = 0;     // of the tensor
  std::uint64_t window = 0;    // how many bytes may be on their way, see FlightLimit; 0: as many as the system likes
};

/// Header of a slice of `exchange`, the `sequence`-th of its ring.
SliceHeader slice_header(const Exchange& exchange, std::uint64_t sequence, std::size_t round, std::size_t offset,
                         std::size_t bytes);

/// Throws ProtocolError when `arrived` is not a slice that begins where `expected` begins, or is longer than `left`,
/// the rest of its round. `expected.bytes` does not matter.
void check_slice(const SliceHeader& arrived, const SliceHeader& expected, std::size_t left);

}  // namespace fold3d::comm
