// Sum of squares of a flat tensor, and whether all of it is finite: the norm of a bucket's shard.
#pragma once

#include <cstddef>

#include "kernels/number.h"

namespace fold3d::kernels {

/// How the sum is ordered, whatever computes it: blocks of kSquaresBlock elements; in each, lane i adds up elements
/// i, i + kSquaresLanes, ...; then the lanes are added pairwise. The blocks' sums are added in the same way.
constexpr int kSquaresLanes = 256;
constexpr std::size_t kSquaresBlock = 64 * kSquaresLanes;

constexpr std::size_t squares_blocks(std::size_t count) { return (count + kSquaresBlock - 1) / kSquaresBlock; }

/// Adds to result[0] the sum of the squares of `count` numbers, in fp64, and sets result[1] to 1 if any of them is
/// infinite or none.
namespace cpu {
void squares(Dtype dtype, const void* numbers, std::size_t count, double* result);
}

namespace cuda {
/// `partial`: room for 2 * squares_blocks(count) numbers, until the stream has passed. All memory is the device's.
/// Throws std::runtime_error when it cannot be launched.
void squares(Dtype dtype, const void* numbers, std::size_t count, double* partial, double* result, void* stream);
}  // namespace cuda

}  // namespace fold3d::kernels
