// combine: arithmetic on the elements of tensors, those of 16 bits above all.
#include "comm/base/number.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "harness/tensor_group.h"

namespace fold3d::test {
namespace {

using comm::Number;
using comm::Reduction;

template <class Value>
Value combined(Number number, Reduction reduction, Value a, Value b) {
  std::vector<Value> left{a};
  const std::vector<Value> right{b};
  const std::array<const std::byte*, 2> parts = {bytes_of(left).data(), bytes_of(right).data()};
  comm::combine(number, reduction, writable_bytes_of(left), parts);
  return left[0];
}

/// Straight from the definition of the format.
double half_value(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double value = exponent == 0    ? std::ldexp(fraction, -24)
                 : exponent == 31 ? (fraction != 0 ? std::nan("") : std::numeric_limits<double>::infinity())
                                  : std::ldexp(1024 + fraction, exponent - 25);
  return (bits & 0x8000) != 0 ? -value : value;
}

TEST(Number, EveryHalfPlusZeroIsItself) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const auto sum = combined<std::uint16_t>(Number::kFloat16, Reduction::kSum, half, 0);
    if (std::isnan(half_value(half))) {
      EXPECT_TRUE(std::isnan(half_value(sum)));
    } else {
      EXPECT_EQ(half_value(sum), half_value(half)) << bits;
    }
  }
}

template <class Stored>
void expect_alike_at_once_and_one_by_one(Number number, Reduction reduction, const std::vector<Stored>& a) {
  std::vector<Stored> b(a.rbegin(), a.rend()), together(a.size()), alone(a.size());
  const std::vector<const std::byte*> parts{bytes_of(a).data(), bytes_of(b).data(), bytes_of(a).data()};
  comm::combine(number, reduction, writable_bytes_of(together), parts);
  for (std::size_t i = 0; i < a.size(); ++i) {
    const std::vector<const std::byte*> one{bytes_of(a).data() + i * sizeof(Stored),
                                            bytes_of(b).data() + i * sizeof(Stored),
                                            bytes_of(a).data() + i * sizeof(Stored)};
    comm::combine(number, reduction, std::as_writable_bytes(std::span(alone).subspan(i, 1)), one);
  }
  EXPECT_EQ(0, std::memcmp(together.data(), alone.data(), a.size() * sizeof(Stored)));
}

TEST(Number, ManyAtOnceAreAsOneByOne) {  // other instructions compute them
  std::vector<std::uint16_t> all(0x10000 + 5);
  std::vector<float> singles(all.size());
  std::vector<double> doubles(all.size());
  std::mt19937_64 random(2);
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<std::uint16_t>(i);  // no numbers, infinite and subnormal ones included
    singles[i] = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    doubles[i] = std::bit_cast<double>(random());
    // A sum of two that are no numbers is either of them, by the order in which a compiler gives them to the CPU.
    if (std::isnan(singles[i])) singles[i] = std::numeric_limits<float>::infinity();
    if (std::isnan(doubles[i])) doubles[i] = std::numeric_limits<double>::infinity();
  }
  for (const Reduction reduction : {Reduction::kSum, Reduction::kMax}) {
    expect_alike_at_once_and_one_by_one(Number::kFloat16, reduction, all);
    expect_alike_at_once_and_one_by_one(Number::kBFloat16, reduction, all);
    expect_alike_at_once_and_one_by_one(Number::kFloat32, reduction, singles);
    expect_alike_at_once_and_one_by_one(Number::kFloat64, reduction, doubles);
  }
}

TEST(Number, SumsOfHalvesAreTheNearest) {
  std::mt19937 random(1);
  for (int i = 0; i < 200'000; ++i) {
    const auto a = static_cast<std::uint16_t>(random() % 0x7C00), b = static_cast<std::uint16_t>(random() % 0x7C00);
    const auto sum = combined<std::uint16_t>(Number::kFloat16, Reduction::kSum, a, b);
    const double exact = half_value(a) + half_value(b);
    if (exact >= 65520.0) {  // half way from the largest number to what would come next
      EXPECT_EQ(sum, 0x7C00);
      continue;
    }
    const double error = std::fabs(half_value(sum) - exact);
    for (const int neighbour : {-1, 1}) {
      const auto other = static_cast<std::uint16_t>(sum + neighbour);
      if (other >= 0x7C00) continue;
      const double other_error = std::fabs(half_value(other) - exact);
      EXPECT_LE(error, other_error);
      EXPECT_TRUE(error < other_error || (sum & 1) == 0);  // ties to even
    }
  }
}

TEST(Number, SumsOfBfloatsAreTheNearest) {
  const auto sum = [](float a, float b) {
    const auto bits = [](float value) { return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16); };
    const auto out = combined<std::uint16_t>(Number::kBFloat16, Reduction::kSum, bits(a), bits(b));
    return std::bit_cast<float>(static_cast<std::uint32_t>(out) << 16);
  };
  EXPECT_EQ(sum(1.0f, 2.0f), 3.0f);
  EXPECT_EQ(sum(256.0f, 1.0f), 256.0f);  // half way: to even
  EXPECT_EQ(sum(258.0f, 1.0f), 260.0f);
  EXPECT_EQ(sum(256.0f, 1.5f), 258.0f);
  EXPECT_TRUE(std::isnan(sum(std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity())));
  EXPECT_TRUE(std::isinf(sum(0x1.FEp127f, 0x1.FEp127f)));
}

TEST(Number, ManyBfloatsAreRoundedOnce) {
  const std::vector<std::uint16_t> large{0x4380}, one{0x3F80};  // 256 and 1
  std::vector<std::uint16_t> out{0};
  const std::vector<const std::byte*> parts{bytes_of(large).data(), bytes_of(one).data(), bytes_of(one).data()};
  comm::combine(Number::kBFloat16, Reduction::kSum, writable_bytes_of(out), parts);
  EXPECT_EQ(out[0], 0x4381);  // 258: 256 + 1 would have been 256
}

TEST(Number, TheLargerOneWinsAndANanStays) {
  const float nan = std::nanf("");
  EXPECT_EQ(combined(Number::kFloat32, Reduction::kMax, -3.0f, 2.0f), 2.0f);
  EXPECT_EQ(combined(Number::kFloat64, Reduction::kMax, 5.0, 2.0), 5.0);
  EXPECT_EQ(combined<std::int64_t>(Number::kInt64, Reduction::kMax, -7, -8), -7);
  EXPECT_EQ(combined<std::int32_t>(Number::kInt32, Reduction::kSum, -7, 9), 2);
  EXPECT_TRUE(std::isnan(combined(Number::kFloat32, Reduction::kMax, nan, 2.0f)));
  EXPECT_TRUE(std::isnan(combined(Number::kFloat32, Reduction::kMax, 2.0f, nan)));
}

template <class Stored>
void expect_the_same_bits_in_either_order(Number number, const std::vector<Stored>& values) {
  for (const Stored a : values) {
    for (const Stored b : values) {
      const Stored ab = combined(number, Reduction::kMax, a, b), ba = combined(number, Reduction::kMax, b, a);
      EXPECT_EQ(std::memcmp(&ab, &ba, sizeof ab), 0) << static_cast<int>(number) << ": " << a << " and " << b;
    }
  }
}

TEST(Number, TheLargerOneHasTheSameBitsWhicheverComesFirst) {
  // Two ranks of a pair each take their own element first.
  const auto floats = [](auto zero) {
    using Value = decltype(zero);
    using Limits = std::numeric_limits<Value>;
    return std::vector<Value>{zero,
                              -zero,
                              Limits::quiet_NaN(),
                              std::copysign(Limits::quiet_NaN(), Value{-1}),
                              static_cast<Value>(std::nan("7")),
                              Value{1},
                              Value{-1},
                              Limits::denorm_min(),
                              Limits::infinity(),
                              -Limits::infinity()};
  };
  expect_the_same_bits_in_either_order(Number::kFloat32, floats(0.0f));
  expect_the_same_bits_in_either_order(Number::kFloat64, floats(0.0));
  const std::vector<std::uint16_t> halves{0, 0x8000, 0x7E00, 0xFE00, 0x7E07, 0x3C00, 0xBC00, 1, 0x7C00, 0xFC00};
  expect_the_same_bits_in_either_order(Number::kFloat16, halves);
  const std::vector<std::uint16_t> bfloats{0, 0x8000, 0x7FC0, 0xFFC0, 0x7FC7, 0x3F80, 0xBF80, 1, 0x7F80, 0xFF80};
  expect_the_same_bits_in_either_order(Number::kBFloat16, bfloats);
  EXPECT_FALSE(std::signbit(combined(Number::kFloat32, Reduction::kMax, -0.0f, 0.0f)));
}

TEST(Number, OtherElementsAreNotReduced) {
  EXPECT_THROW(combined<char>(Number::kOther, Reduction::kSum, 'a', 'b'), std::invalid_argument);
}

}  // namespace
}  // namespace fold3d::test
