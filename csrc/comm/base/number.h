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

/// into[i] = parts[0][i] + parts[1][i] + ..., in this order, or the largest, whose bits are the same in every order: +0
/// is above -0, and a NaN of any makes the one with no payload. Elements of 16 bits are added in float32 and rounded
/// once, to the nearest, ties to even. All are as long as `into`, which may be one of them, without a partial element,
/// and aligned to elements. Throws std::invalid_argument for kOther.
void combine(Number number, Reduction reduction, std::span<std::byte> into, std::span<const std::byte* const> parts);

/// sum[i] = (sum[i] + part[i]) * scale, of kFloat32 or kFloat64. Equally long; without a partial element.
void add_scaled(std::span<std::byte> sum, std::span<const std::byte> part, Number number, double scale);

/// sum[i] += part[i], of float and bfloat16 elements. Equally many; without a partial element, as below.
void add_bfloat16(std::span<std::byte> sum, std::span<const std::byte> part);
/// sum[i] = (sum[i] + part[i]) * scale, rounded to bfloat16.
void add_last_bfloat16(std::span<std::byte> sum, std::span<const std::byte> part, double scale);
/// float to bfloat16, and back.
void narrow(std::span<const std::byte> values, std::span<std::byte> rounded);
void widen(std::span<const std::byte> rounded, std::span<std::byte> values);

}  // namespace fold3d::comm
