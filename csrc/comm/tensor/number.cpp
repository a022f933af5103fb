#include "comm/tensor/number.h"

#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "core/bfloat16.h"

namespace fold3d::comm {
namespace {

// Conversions of IEEE half precision as in M. Dukhan's FP16 library: exact for every value, subnormal ones included.
float of_half(std::uint16_t half) {
  constexpr std::uint32_t kExponentOffset = 0xE0u << 23, kMagic = 126u << 23, kFirstNormal = 1u << 27;
  const std::uint32_t word = static_cast<std::uint32_t>(half) << 16;
  const std::uint32_t doubled = word + word;
  const float normal = std::bit_cast<float>((doubled >> 4) + kExponentOffset) * 0x1.0p-112f;
  const float subnormal = std::bit_cast<float>((doubled >> 17) | kMagic) - 0.5f;
  const float magnitude = doubled < kFirstNormal ? subnormal : normal;
  return std::bit_cast<float>((word & 0x80000000u) | std::bit_cast<std::uint32_t>(magnitude));
}

std::uint16_t to_half(float value) {
  const std::uint32_t word = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t doubled = word + word;
  std::uint32_t bias = doubled & 0xFF000000u;
  if (bias < 0x71000000u) bias = 0x71000000u;
  const float rounded =
      std::bit_cast<float>((bias >> 1) + 0x07800000u) + (std::fabs(value) * 0x1.0p+112f) * 0x1.0p-110f;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(rounded);
  const std::uint32_t magnitude = ((bits >> 13) & 0x7C00u) + (bits & 0x0FFFu);
  return static_cast<std::uint16_t>((word & 0x80000000u) >> 16 | (doubled > 0xFF000000u ? 0x7E00u : magnitude));
}

/// How an element is stored, and what it is computed as.
template <class Value>
struct Plain {
  using Stored = Value;
  using Computed = Value;
  static Value load(Value value) { return value; }
  static Value store(Value value) { return value; }
};

struct Half {
  using Stored = std::uint16_t;
  using Computed = float;
  static float load(std::uint16_t value) { return of_half(value); }
  static std::uint16_t store(float value) { return to_half(value); }
};

struct BFloat {
  using Stored = std::uint16_t;
  using Computed = float;
  static float load(std::uint16_t value) { return core::from_bfloat16(value); }
  static std::uint16_t store(float value) { return core::to_bfloat16(value); }
};

/// The same bits whichever comes first, as every rank begins with another: one NaN for all, and +0 above -0.
template <class Value>
Value larger(Value a, Value b) {
  if constexpr (std::is_floating_point_v<Value>) {
    if (a != a || b != b) return std::numeric_limits<Value>::quiet_NaN();
    if (a == b) return std::signbit(a) ? b : a;
  }
  return a > b ? a : b;
}

template <class Format, class Operation>
void combine_as(std::span<std::byte> into, const std::byte* a, const std::byte* b, Operation operation) {
  using Stored = typename Format::Stored;
  Stored* const out = reinterpret_cast<Stored*>(into.data());
  const Stored* const left = reinterpret_cast<const Stored*>(a);
  const Stored* const right = reinterpret_cast<const Stored*>(b);
  const std::size_t count = into.size() / sizeof(Stored);
  for (std::size_t i = 0; i < count; ++i) {
    out[i] = Format::store(operation(Format::load(left[i]), Format::load(right[i])));
  }
}

template <class Format, class Operation>
void combine_all_as(std::span<std::byte> into, std::span<const std::byte* const> parts, Operation operation) {
  using Stored = typename Format::Stored;
  Stored* const out = reinterpret_cast<Stored*>(into.data());
  const std::size_t count = into.size() / sizeof(Stored);
  for (std::size_t i = 0; i < count; ++i) {
    typename Format::Computed total = Format::load(reinterpret_cast<const Stored*>(parts[0])[i]);
    for (std::size_t k = 1; k < parts.size(); ++k) {
      total = operation(total, Format::load(reinterpret_cast<const Stored*>(parts[k])[i]));
    }
    out[i] = Format::store(total);
  }
}

/// Calls `call` with the format of `number` and the operation of `reduction`.
template <class Call>
void with_types(Number number, Reduction reduction, Call call) {
  const auto with = [&]<class Format>(Format format) {
    using Value = typename Format::Computed;
    if (reduction == Reduction::kSum) {
      call(format, [](Value a, Value b) { return static_cast<Value>(a + b); });
    } else {
      call(format, [](Value a, Value b) { return larger(a, b); });
    }
  };
  switch (number) {
    case Number::kFloat32:
      return with(Plain<float>{});
    case Number::kFloat64:
      return with(Plain<double>{});
    case Number::kFloat16:
      return with(Half{});
    case Number::kBFloat16:
      return with(BFloat{});
    case Number::kInt32:
      return with(Plain<std::int32_t>{});
    case Number::kInt64:
      return with(Plain<std::int64_t>{});
    case Number::kOther:
      break;
  }
  throw std::invalid_argument("elements of this type cannot be reduced");
}

}  // namespace

std::size_t element_bytes(Number number) {
  switch (number) {
    case Number::kFloat32:
    case Number::kInt32:
      return 4;
    case Number::kFloat64:
    case Number::kInt64:
      return 8;
    case Number::kFloat16:
    case Number::kBFloat16:
      return 2;
    case Number::kOther:
      break;
  }
  return 1;
}

void combine(Number number, Reduction reduction, std::span<std::byte> into, std::span<const std::byte> a,
             std::span<const std::byte> b) {
  with_types(number, reduction,
             [&]<class Format>(Format, auto operation) { combine_as<Format>(into, a.data(), b.data(), operation); });
}

void combine_all(Number number, Reduction reduction, std::span<std::byte> into,
                 std::span<const std::byte* const> parts) {
  with_types(number, reduction,
             [&]<class Format>(Format, auto operation) { combine_all_as<Format>(into, parts, operation); });
}

}  // namespace fold3d::comm
