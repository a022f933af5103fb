#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/ring/collective.h"

namespace fold3d::comm {

/// What goes before every slice of a ring. The sender decides how long slices are; the receiver checks that what
/// arrives is what comes next in its own list.
struct SliceHeader {
  std::uint32_t magic = 0;
  std::uint8_t traffic = 0;  // NicArbiter::Traffic
  std::uint8_t element = 0;
  std::uint8_t element_bytes = 0;
  std::uint8_t unused = 0;
  std::int32_t bucket = 0;
  std::uint32_t round = 0;
  std::int64_t step = 0;
  std::uint64_t shard_bytes = 0;
  std::uint64_t offset = 0;  // in the shard
  std::uint64_t bytes = 0;   // of the slice
  std::uint64_t window = 0;  // how many bytes may be on their way, see FlightLimit; 0: as many as the system likes
};

/// Header of a slice of `collective`.
SliceHeader slice_header(NicArbiter::Traffic traffic, const Collective& collective, std::size_t shard_bytes, int round,
                         std::size_t offset, std::size_t bytes);

/// Throws ProtocolError when `arrived` is not a slice that begins where `expected` begins, or is longer than the rest
/// of its shard. `expected.bytes` does not matter.
void check_slice(const SliceHeader& arrived, const SliceHeader& expected);

}  // namespace fold3d::comm
