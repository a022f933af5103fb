#include <cstdint>

#include "kernels/launched.h"
#include "kernels/parts.h"

namespace fold3d::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::size_t kPerBlock = 64 * 1024;
constexpr int kMost = 120;  // parts of a launch, whose arguments have 4 KiB

struct Batch {
  Part parts[kMost];
  unsigned first_block[kMost + 1];  // of each part, and the number of blocks
  int count = 0;
};
static_assert(sizeof(Batch) <= 4096);

__device__ bool is_aligned(const void* memory) { return reinterpret_cast<std::uintptr_t>(memory) % sizeof(uint4) == 0; }

__global__ void copy(const __grid_constant__ Batch batch) {
  int which = 0;
  while (batch.first_block[which + 1] <= blockIdx.x) ++which;
  const Part& part = batch.parts[which];
  const std::size_t begin = (blockIdx.x - batch.first_block[which]) * kPerBlock;
  const std::size_t end = begin + kPerBlock < part.bytes ? begin + kPerBlock : part.bytes;
  const char* const from = static_cast<const char*>(part.from);
  char* const to = static_cast<char*>(part.to);
  std::size_t at = begin;
  if (is_aligned(from) && is_aligned(to)) {  // as all but views at odd places are
    const std::size_t words = (end - begin) / sizeof(uint4);
    for (std::size_t k = threadIdx.x; k < words; k += kThreads) {
      reinterpret_cast<uint4*>(to + begin)[k] = reinterpret_cast<const uint4*>(from + begin)[k];
    }
    at = begin + words * sizeof(uint4);
  }
  for (at += threadIdx.x; at < end; at += kThreads) to[at] = from[at];
}

}  // namespace

void copy_parts(const std::vector<Part>& parts, void* stream) {
  for (std::size_t next = 0; next < parts.size();) {
    Batch batch;
    unsigned blocks = 0;
    for (; next < parts.size() && batch.count < kMost; ++next) {
      if (parts[next].bytes == 0) continue;
      batch.parts[batch.count] = parts[next];
      batch.first_block[batch.count++] = blocks;
      blocks += static_cast<unsigned>((parts[next].bytes + kPerBlock - 1) / kPerBlock);
    }
    batch.first_block[batch.count] = blocks;
    if (blocks == 0) continue;
    copy<<<blocks, kThreads, 0, stream_of(stream)>>>(batch);
    check_launched("copy_parts");
  }
}

}  // namespace fold3d::kernels::cuda
