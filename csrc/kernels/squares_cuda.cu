#include "kernels/launched.h"
#include "kernels/squares.h"

namespace fold3d::kernels::cuda {
namespace {

/// Of a block's lanes, pairwise; valid in lane 0.
__device__ double pairwise(double mine) {
  __shared__ double lanes[kSquaresLanes];
  lanes[threadIdx.x] = mine;
  __syncthreads();
  for (int half = kSquaresLanes / 2; half > 0; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half) lanes[threadIdx.x] += lanes[threadIdx.x + half];
    __syncthreads();
  }
  return lanes[0];
}

template <class Stored>
__global__ void sum_blocks(const Stored* numbers, std::size_t count, double* partial) {
  const std::size_t begin = blockIdx.x * kSquaresBlock;
  const std::size_t end = begin + kSquaresBlock < count ? begin + kSquaresBlock : count;
  double mine = 0;
  bool finite = true;
  for (std::size_t at = begin + threadIdx.x; at < end; at += kSquaresLanes) {
    const double value = load(numbers[at]);
    finite &= is_finite(value);
    mine += value * value;
  }
  const double total = pairwise(mine);
  const int broken = __syncthreads_or(!finite);
  if (threadIdx.x == 0) {
    partial[2 * blockIdx.x] = total;
    partial[2 * blockIdx.x + 1] = broken ? 1 : 0;
  }
}

__global__ void sum_partials(const double* partial, std::size_t blocks, double* result) {
  double mine = 0;
  bool finite = true;
  for (std::size_t k = threadIdx.x; k < blocks; k += kSquaresLanes) {
    mine += partial[2 * k];
    finite &= partial[2 * k + 1] == 0;
  }
  const double total = pairwise(mine);
  const int broken = __syncthreads_or(!finite);
  if (threadIdx.x == 0) {
    result[0] += total;
    if (broken) result[1] = 1;
  }
}

template <class Stored>
void launch(const void* numbers, std::size_t count, double* partial, double* result, cudaStream_t stream) {
  const std::size_t blocks = squares_blocks(count);
  sum_blocks<<<static_cast<unsigned>(blocks), kSquaresLanes, 0, stream>>>(static_cast<const Stored*>(numbers), count,
                                                                          partial);
  check_launched("squares");
  sum_partials<<<1, kSquaresLanes, 0, stream>>>(partial, blocks, result);
  check_launched("squares");
}

}  // namespace

void squares(Dtype dtype, const void* numbers, std::size_t count, double* partial, double* result, void* stream) {
  if (count == 0) return;
  switch (dtype) {
    case Dtype::kFloat32:
      return launch<float>(numbers, count, partial, result, stream_of(stream));
    case Dtype::kFloat64:
      return launch<double>(numbers, count, partial, result, stream_of(stream));
    case Dtype::kBFloat16:
      return launch<BFloat16>(numbers, count, partial, result, stream_of(stream));
  }
}

}  // namespace fold3d::kernels::cuda
