#include "kernels/squares.h"

#include <algorithm>
#include <array>
#include <vector>

#include "core/vectorised.h"

namespace fold3d::kernels::cpu {
namespace {

using Lanes = std::array<double, kSquaresLanes>;

double pairwise(Lanes& lanes) {
  for (int half = kSquaresLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

template <class Stored>
double block(const Stored* numbers, std::size_t count, bool& finite) {
  Lanes lanes{}, zeros{};  // what is not finite is no number less itself, which no sum makes 0 again
  for (std::size_t row = 0; row < count; row += kSquaresLanes) {
    const Stored* const these = numbers + row;
    const std::size_t width = std::min<std::size_t>(kSquaresLanes, count - row);
    for (std::size_t lane = 0; lane < width; ++lane) {
      const double value = load(these[lane]);
      zeros[lane] += value - value;
      lanes[lane] += value * value;
    }
  }
  finite &= pairwise(zeros) == 0;
  return pairwise(lanes);
}

template <class Stored>
void sum(const Stored* numbers, std::size_t count, double* result) {
  bool finite = true;
  Lanes lanes{};
  for (std::size_t k = 0; k < squares_blocks(count); ++k) {
    const std::size_t begin = k * kSquaresBlock;
    lanes[k % kSquaresLanes] += block(numbers + begin, std::min(kSquaresBlock, count - begin), finite);
  }
  result[0] += pairwise(lanes);
  if (!finite) result[1] = 1;
}

}  // namespace

FOLD3D_VECTORISED
void squares(Dtype dtype, const void* numbers, std::size_t count, double* result) {
  switch (dtype) {
    case Dtype::kFloat32:
      return sum(static_cast<const float*>(numbers), count, result);
    case Dtype::kFloat64:
      return sum(static_cast<const double*>(numbers), count, result);
    case Dtype::kBFloat16:
      return sum(static_cast<const BFloat16*>(numbers), count, result);
  }
}

}  // namespace fold3d::kernels::cpu
