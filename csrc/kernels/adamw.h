// Clipping and AdamW (Loshchilov and Hutter, 2019, algorithm 2) of many tensors in one pass over their memory.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/number.h"

namespace fold3d::kernels {

/// One tensor; all of its arrays have `count` elements that lie together.
struct AdamwTensor {
  void* weight = nullptr;
  float* master = nullptr;         ///< the weight in full precision, which `weight` is rounded from; null: it is whole
  const void* gradient = nullptr;  ///< stays as it is
  void* mean = nullptr;            ///< of gradients
  void* square = nullptr;          ///< mean of their squares
  const float* step_at = nullptr;  ///< how many steps were taken, this one included; null: it is in `step`
  double step = 0;
  std::size_t count = 0;
};

/// Of what the arrays of all tensors of a call consist.
struct AdamwDtypes {
  Dtype weight, gradient, moments;
};

struct AdamwSettings {
  double lr, beta1, beta2, eps, weight_decay;
  const double* scale_at = nullptr;  ///< by what gradients are multiplied; null: it is in `scale`
  double scale = 1;
};

/// Whether there is a kernel for these: fp64 throughout, or weights, gradients and moments of fp32 or bf16, where fp32
/// weights have fp32 moments.
bool can_adamw(const AdamwDtypes& dtypes);

/// Both throw std::invalid_argument unless can_adamw().
namespace cpu {
void adamw(const AdamwDtypes& dtypes, const std::vector<AdamwTensor>& tensors, const AdamwSettings& settings);
}

namespace cuda {
/// Throws std::runtime_error when it cannot be launched.
void adamw(const AdamwDtypes& dtypes, const std::vector<AdamwTensor>& tensors, const AdamwSettings& settings,
           void* stream);
}  // namespace cuda

}  // namespace fold3d::kernels
