#include "comm/base/number.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define FOLD3D_X86
#include <immintrin.h>
#endif

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "core/bfloat16.h"
#include "core/vectorised.h"

namespace fold3d::comm {
namespace {

/// `a` where the condition holds: without a branch, so that loops over it can be vectorised.
template <class Word>
Word choose(bool condition, Word a, Word b) {
  const Word mask = Word{0} - static_cast<Word>(condition);
  return (a & mask) | (b & ~mask);
}

// Conversions of IEEE half precision as in M. Dukhan's FP16 library: exact for every value, subnormal ones included.
float of_half(std::uint16_t half) {
  constexpr std::uint32_t kExponentOffset = 0xE0u << 23, kMagic = 126u << 23, kFirstNormal = 1u << 27;
  const std::uint32_t word = static_cast<std::uint32_t>(half) << 16;
  const std::uint32_t doubled = word + word;
  const float normal = std::bit_cast<float>((doubled >> 4) + kExponentOffset) * 0x1.0p-112f;
  const float subnormal = std::bit_cast<float>((doubled >> 17) | kMagic) - 0.5f;
  const std::uint32_t magnitude =
      choose(doubled < kFirstNormal, std::bit_cast<std::uint32_t>(subnormal), std::bit_cast<std::uint32_t>(normal));
  return std::bit_cast<float>((word & 0x80000000u) | magnitude);
}

std::uint16_t to_half(float value) {
  const std::uint32_t word = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t doubled = word + word;
  const std::uint32_t bias = std::max(doubled & 0xFF000000u, 0x71000000u);
  const float positive = std::bit_cast<float>(word & 0x7FFFFFFFu);
  const float rounded = std::bit_cast<float>((bias >> 1) + 0x07800000u) + (positive * 0x1.0p+112f) * 0x1.0p-110f;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(rounded);
  const std::uint32_t magnitude = ((bits >> 13) & 0x7C00u) + (bits & 0x0FFFu);
  return static_cast<std::uint16_t>((word & 0x80000000u) >> 16 | choose(doubled > 0xFF000000u, 0x7E00u, magnitude));
}

#ifdef FOLD3D_X86
// The CPU's own conversions, eight at a time, return how many they did: the same bits as above, also of what is no
// number.
__attribute__((target("avx2,f16c"))) std::size_t of_eights(const std::uint16_t* halves, float* values,
                                                           std::size_t count) {
  std::size_t at = 0;
  for (; at + 8 <= count; at += 8) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + at));
    _mm256_storeu_ps(values + at, _mm256_cvtph_ps(eight));
  }
  return at;
}

__attribute__((target("avx2,f16c"))) std::size_t to_eights(const float* values, std::uint16_t* halves,
                                                           std::size_t count) {
  const __m256 none = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000)), sign = _mm256_set1_ps(-0.0f);
  std::size_t at = 0;
  for (; at + 8 <= count; at += 8) {
    const __m256 eight = _mm256_loadu_ps(values + at);
    const __m256 signed_none = _mm256_or_ps(none, _mm256_and_ps(sign, eight));
    const __m256 chosen = _mm256_blendv_ps(eight, signed_none, _mm256_cmp_ps(eight, eight, _CMP_UNORD_Q));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(halves + at), _mm256_cvtps_ph(chosen, _MM_FROUND_TO_NEAREST_INT));
  }
  return at;
}

bool converts_eights() {
  static const bool does = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return does;
}
#else
std::size_t of_eights(const std::uint16_t*, float*, std::size_t) { return 0; }
std::size_t to_eights(const float*, std::uint16_t*, std::size_t) { return 0; }
bool converts_eights() { return false; }
#endif

// How elements are stored, and what they are computed as. `load` returns where they are now: in `room`, or where they
// were.

template <class Value>
struct Plain {
  using Stored = Value;
  using Computed = Value;
  static const Value* load(const Value* stored, Value*, std::size_t) { return stored; }
  static void store(const Value* values, Value* stored, std::size_t count) { std::copy_n(values, count, stored); }
};

struct Half {
  using Stored = std::uint16_t;
  using Computed = float;
  static const float* load(const std::uint16_t* stored, float* room, std::size_t count) {
    const std::size_t done = converts_eights() ? of_eights(stored, room, count) : 0;
    for (std::size_t i = done; i < count; ++i) room[i] = of_half(stored[i]);
    return room;
  }
  static void store(const float* values, std::uint16_t* stored, std::size_t count) {
    const std::size_t done = converts_eights() ? to_eights(values, stored, count) : 0;
    for (std::size_t i = done; i < count; ++i) stored[i] = to_half(values[i]);
  }
};

struct BFloat {
  using Stored = std::uint16_t;
  using Computed = float;
  static const float* load(const std::uint16_t* stored, float* room, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) room[i] = core::from_bfloat16(stored[i]);
    return room;
  }
  static void store(const float* values, std::uint16_t* stored, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) stored[i] = core::to_bfloat16(values[i]);
  }
};

/// The same bits whichever comes first, as every rank begins with another: one NaN for all, and +0 above -0.
template <class Value>
Value larger(Value a, Value b) {
  const Value most = a > b ? a : b;
  if constexpr (std::is_floating_point_v<Value>) {
    using Word = std::conditional_t<sizeof(Value) == 8, std::uint64_t, std::uint32_t>;
    const Word first = std::bit_cast<Word>(a), second = std::bit_cast<Word>(b);
    const Word none = std::bit_cast<Word>(std::numeric_limits<Value>::quiet_NaN());
    const Word chosen = choose(a == b, first & second, std::bit_cast<Word>(most));  // of equal ones only zeros differ
    return std::bit_cast<Value>(choose((a != a) | (b != b), none, chosen));
  }
  return most;
}

/// Elements that are computed with at a time: what they are computed as stays in the first cache.
constexpr std::size_t kAtATime = 1024;

template <class Format, class Operation>
void combine_as(std::span<std::byte> into, std::span<const std::byte* const> parts, Operation operation) {
  using Stored = typename Format::Stored;
  using Value = typename Format::Computed;
  Value totals[kAtATime], room[kAtATime];
  const std::size_t count = into.size() / sizeof(Stored);
  for (std::size_t begin = 0; begin < count; begin += kAtATime) {
    const std::size_t these = std::min(kAtATime, count - begin);
    const auto load = [&](const std::byte* part, Value* values) {
      return Format::load(reinterpret_cast<const Stored*>(part) + begin, values, these);
    };
    const Value* so_far = load(parts[0], totals);
    for (const std::byte* part : parts.subspan(1)) {
      const Value* const next = load(part, room);
      for (std::size_t i = 0; i < these; ++i) totals[i] = operation(so_far[i], next[i]);
      so_far = totals;
    }
    Format::store(so_far, reinterpret_cast<Stored*>(into.data()) + begin, these);
  }
}

template <class Value>
void add(Value* __restrict sum, const Value* __restrict part, std::size_t count, Value scale) {
  if (scale == Value{1}) {
    for (std::size_t i = 0; i < count; ++i) sum[i] += part[i];
  } else {
    for (std::size_t i = 0; i < count; ++i) sum[i] = (sum[i] + part[i]) * scale;
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

FOLD3D_VECTORISED
void combine(Number number, Reduction reduction, std::span<std::byte> into, std::span<const std::byte* const> parts) {
  with_types(number, reduction,
             [&]<class Format>(Format, auto operation) { combine_as<Format>(into, parts, operation); });
}

FOLD3D_VECTORISED
void add_scaled(std::span<std::byte> sum, std::span<const std::byte> part, Number number, double scale) {
  if (number == Number::kFloat32) {
    add(reinterpret_cast<float*>(sum.data()), reinterpret_cast<const float*>(part.data()), sum.size() / sizeof(float),
        static_cast<float>(scale));
  } else {
    add(reinterpret_cast<double*>(sum.data()), reinterpret_cast<const double*>(part.data()),
        sum.size() / sizeof(double), scale);
  }
}

FOLD3D_VECTORISED
void add_bfloat16(std::span<std::byte> sum, std::span<const std::byte> part) {
  float* __restrict const values = reinterpret_cast<float*>(sum.data());
  const std::uint16_t* __restrict const added = reinterpret_cast<const std::uint16_t*>(part.data());
  for (std::size_t i = 0; i < sum.size() / sizeof(float); ++i) values[i] += core::from_bfloat16(added[i]);
}

FOLD3D_VECTORISED
void add_last_bfloat16(std::span<std::byte> sum, std::span<const std::byte> part, double scale) {
  float* __restrict const values = reinterpret_cast<float*>(sum.data());
  const std::uint16_t* __restrict const added = reinterpret_cast<const std::uint16_t*>(part.data());
  const auto factor = static_cast<float>(scale);
  for (std::size_t i = 0; i < sum.size() / sizeof(float); ++i) {
    values[i] = core::from_bfloat16(core::to_bfloat16((values[i] + core::from_bfloat16(added[i])) * factor));
  }
}

FOLD3D_VECTORISED
void narrow(std::span<const std::byte> values, std::span<std::byte> rounded) {
  const float* __restrict const from = reinterpret_cast<const float*>(values.data());
  std::uint16_t* __restrict const to = reinterpret_cast<std::uint16_t*>(rounded.data());
  for (std::size_t i = 0; i < values.size() / sizeof(float); ++i) to[i] = core::to_bfloat16(from[i]);
}

FOLD3D_VECTORISED
void widen(std::span<const std::byte> rounded, std::span<std::byte> values) {
  const std::uint16_t* __restrict const from = reinterpret_cast<const std::uint16_t*>(rounded.data());
  float* __restrict const to = reinterpret_cast<float*>(values.data());
  for (std::size_t i = 0; i < values.size() / sizeof(float); ++i) to[i] = core::from_bfloat16(from[i]);
}

}  // namespace fold3d::comm
