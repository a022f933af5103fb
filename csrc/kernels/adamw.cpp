#include "kernels/adamw.h"

#include "core/vectorised.h"
#include "kernels/adamw_element.h"

namespace fold3d::kernels {

bool can_adamw(const AdamwDtypes& dtypes) {
  try {
    with_adamw_types(dtypes, []<class Weight, class Gradient, class Moment>() {});
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

namespace cpu {

FOLD3D_VECTORISED
void adamw(const AdamwDtypes& dtypes, const std::vector<AdamwTensor>& tensors, const AdamwSettings& settings) {
  const double scale = settings.scale_at ? *settings.scale_at : settings.scale;
  with_adamw_types(dtypes, [&]<class Weight, class Gradient, class Moment>() {
    using Math = typename MathOf<Weight>::type;
    for (const AdamwTensor& tensor : tensors) {
      const auto numbers =
          adamw_numbers<Math>(settings, scale, tensor.step_at ? static_cast<double>(*tensor.step_at) : tensor.step);
      for (std::size_t at = 0; at < tensor.count; ++at) adamw_element<Weight, Gradient, Moment>(tensor, at, numbers);
    }
  });
}

}  // namespace cpu

}  // namespace fold3d::kernels
