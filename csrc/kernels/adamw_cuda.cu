#include <algorithm>

#include "kernels/adamw_element.h"
#include "kernels/launched.h"

namespace fold3d::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::size_t kPerBlock = 16 * kThreads;
constexpr int kMost = 40;  // tensors of a launch, whose arguments have 4 KiB

struct Batch {
  AdamwTensor tensors[kMost];
  unsigned first_block[kMost + 1];  // of each tensor, and the number of blocks
  int count = 0;
};
static_assert(sizeof(Batch) + sizeof(AdamwSettings) <= 4096);

template <class Weight, class Gradient, class Moment>
__global__ void step(const __grid_constant__ Batch batch, const AdamwSettings settings) {
  using Math = typename MathOf<Weight>::type;
  __shared__ AdamwNumbers<Math> numbers;
  int which = 0;
  while (batch.first_block[which + 1] <= blockIdx.x) ++which;
  const AdamwTensor& tensor = batch.tensors[which];
  if (threadIdx.x == 0) {
    numbers = adamw_numbers<Math>(settings, settings.scale_at ? *settings.scale_at : settings.scale,
                                  tensor.step_at ? static_cast<double>(*tensor.step_at) : tensor.step);
  }
  __syncthreads();
  const std::size_t begin = (blockIdx.x - batch.first_block[which]) * kPerBlock;
  const std::size_t end = begin + kPerBlock < tensor.count ? begin + kPerBlock : tensor.count;
  for (std::size_t at = begin + threadIdx.x; at < end; at += kThreads) {
    adamw_element<Weight, Gradient, Moment>(tensor, at, numbers);
  }
}

}  // namespace

void adamw(const AdamwDtypes& dtypes, const std::vector<AdamwTensor>& tensors, const AdamwSettings& settings,
           void* stream) {
  with_adamw_types(dtypes, [&]<class Weight, class Gradient, class Moment>() {
    for (std::size_t next = 0; next < tensors.size();) {
      Batch batch;
      unsigned blocks = 0;
      for (; next < tensors.size() && batch.count < kMost; ++next) {
        if (tensors[next].count == 0) continue;
        batch.tensors[batch.count] = tensors[next];
        batch.first_block[batch.count++] = blocks;
        blocks += static_cast<unsigned>((tensors[next].count + kPerBlock - 1) / kPerBlock);
      }
      batch.first_block[batch.count] = blocks;
      if (blocks == 0) continue;
      step<Weight, Gradient, Moment><<<blocks, kThreads, 0, stream_of(stream)>>>(batch, settings);
      check_launched("adamw");
    }
  });
}

}  // namespace fold3d::kernels::cuda
