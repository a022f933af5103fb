// All-in-all-out (Fold3D section III-B, Algorithm 1): all m micro-batches pass segment 0, 1, ... forward,
// then ..., 1, 0 backward; fold with N = m. A segment's DP.sync can start while all earlier segments still
// have their backward to do. The compute order is that of breadth-first pipeline parallelism (Lamy-Poirier
// 2022).
#include "core/generators/fold.h"
#include "core/generators/registry.h"

namespace fold3d::core::generators {

SchedulerInfo aiao() {
  return {.name = "aiao",
          .help = "all-in-all-out: N = m, every micro-batch passes a segment before the next starts (Fold3D)",
          .uses_segments = true,
          .generate = [](const Params& params) {
            return fold_order(params.shape, params.shape.micro_batches, Turn::kAll);
          }};
}

}  // namespace fold3d::core::generators
