// Interleaved 1F1B (Narayanan et al. 2021, section 2.3): fold with N = pp. For m that pp does not divide the
// groups are a little larger than pp, as in torch.distributed.pipelining, which however refuses the m that
// leave groups of two sizes.
#include "core/generators/fold.h"
#include "core/generators/registry.h"

namespace fold3d::core::generators {

SchedulerInfo interleaved() {
  return {.name = "interleaved",
          .help = "interleaved 1F1B: N = pp micro-batches per segment (Megatron)",
          .uses_segments = true,
          .generate = [](const Params& params) { return fold_order(params.shape, params.shape.pp, Turn::kOneFOneB); }};
}

}  // namespace fold3d::core::generators
