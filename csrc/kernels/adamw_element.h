// What one element of a tensor goes through in a step of AdamW, and which types there are of it.
#pragma once

#include <stdexcept>

#include "kernels/adamw.h"

namespace fold3d::kernels {

/// What all elements of a tensor share, rounded once from fp64, as torch rounds Python's numbers.
template <class Math>
struct AdamwNumbers {
  Math scale, keep, mean_rest, square_keep, square_rest, step_size, correction, eps;
};

template <class Math>
FOLD3D_BOTH AdamwNumbers<Math> adamw_numbers(const AdamwSettings& settings, double scale, double step) {
  AdamwNumbers<Math> out;
  out.scale = static_cast<Math>(scale);
  out.keep = static_cast<Math>(1 - settings.lr * settings.weight_decay);
  out.mean_rest = static_cast<Math>(1 - settings.beta1);
  out.square_keep = static_cast<Math>(settings.beta2);
  out.square_rest = static_cast<Math>(1 - settings.beta2);
  out.step_size = static_cast<Math>(settings.lr / (1 - pow(settings.beta1, step)));
  out.correction = static_cast<Math>(sqrt(1 - pow(settings.beta2, step)));
  out.eps = static_cast<Math>(settings.eps);
  return out;
}

template <class Weight, class Gradient, class Moment>
FOLD3D_BOTH void adamw_element(const AdamwTensor& tensor, std::size_t at,
                               const AdamwNumbers<typename MathOf<Weight>::type>& numbers) {
  using Math = typename MathOf<Weight>::type;
  Weight* const weights = static_cast<Weight*>(tensor.weight);
  Moment* const means = static_cast<Moment*>(tensor.mean);
  Moment* const squares = static_cast<Moment*>(tensor.square);
  const Math gradient = static_cast<Math>(load(static_cast<const Gradient*>(tensor.gradient)[at])) * numbers.scale;
  Math weight = tensor.master ? static_cast<Math>(tensor.master[at]) : static_cast<Math>(load(weights[at]));
  Math mean = static_cast<Math>(load(means[at]));
  Math square = static_cast<Math>(load(squares[at]));
  weight *= numbers.keep;
  mean += (gradient - mean) * numbers.mean_rest;
  square = square * numbers.square_keep + numbers.square_rest * gradient * gradient;
  weight -= numbers.step_size * mean / (sqrt(square) / numbers.correction + numbers.eps);
  store(weights[at], weight);
  if (tensor.master) tensor.master[at] = static_cast<float>(weight);
  store(means[at], mean);
  store(squares[at], square);
}

/// Calls `run.operator()<Weight, Gradient, Moment>()` with the types that are asked for.
template <class Run>
void with_adamw_types(const AdamwDtypes& dtypes, const Run& run) {
  using D = Dtype;
  if (dtypes.weight == D::kFloat64 && dtypes.gradient == D::kFloat64 && dtypes.moments == D::kFloat64) {
    return run.template operator()<double, double, double>();
  }
  const bool short_gradient = dtypes.gradient == D::kBFloat16;
  if (dtypes.gradient == D::kFloat32 || short_gradient) {
    if (dtypes.weight == D::kFloat32 && dtypes.moments == D::kFloat32) {
      return short_gradient ? run.template operator()<float, BFloat16, float>()
                            : run.template operator()<float, float, float>();
    }
    if (dtypes.weight == D::kBFloat16 && dtypes.moments == D::kFloat32) {
      return short_gradient ? run.template operator()<BFloat16, BFloat16, float>()
                            : run.template operator()<BFloat16, float, float>();
    }
    if (dtypes.weight == D::kBFloat16 && dtypes.moments == D::kBFloat16) {
      return short_gradient ? run.template operator()<BFloat16, BFloat16, BFloat16>()
                            : run.template operator()<BFloat16, float, BFloat16>();
    }
  }
  throw std::invalid_argument("there is no AdamW kernel for these types of weights, gradients and moments");
}

}  // namespace fold3d::kernels
