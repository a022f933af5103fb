#pragma once

#include <vector>

#include "core/ir/schedule.h"

namespace fold3d::core {

/// Of every micro-batch: whether its forward through the last chunk goes on with the backward of the head, what follows
/// the model's last block. So it is where the chunk's backward is not what the rank computes next, for logits would
/// wait for it; not where it is, nor where the forward keeps no graph and runs again. `actions`: of the last stage.
std::vector<bool> turning_heads(const Shape& shape, const std::vector<Action>& actions);

}  // namespace fold3d::core
