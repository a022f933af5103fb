#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace fold3d::comm {

/// What the elements of an exchanged tensor are, as far as arithmetic is concerned.
enum class Number : std::uint8_t { kFloat32, kFloat64, kFloat16, kBFloat16, kInt32, kInt64, kOther };

/// What becomes of everybody's elements.
enum class Reduction : std::uint8_t { kSum, kMax };

/// Bytes of an element; 1 for kOther.
std::size_t element_bytes(Number number);

/// into[i] = a[i] + b[i], or the larger one, whose bits are the same with a and b exchanged: +0 is above -0, and a NaN
/// of either makes the one with no payload. Elements of 16 bits are added in float32 and rounded to the nearest, ties
/// to even. Equally long, without a partial element, aligned to elements; `into` may be `a`. Throws
/// std::invalid_argument for kOther.
void combine(Number number, Reduction reduction, std::span<std::byte> into, std::span<const std::byte> a,
             std::span<const std::byte> b);

/// As combine(), of more than two at once, in the order given: sums of 16-bit elements are rounded once.
void combine_all(Number number, Reduction reduction, std::span<std::byte> into,
                 std::span<const std::byte* const> parts);

}  // namespace fold3d::comm
