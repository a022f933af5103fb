#pragma once

#include <vector>

#include "core/ir/schedule.h"

namespace fold3d::core {

/// Per rank, the largest number of stashed activations at any point of its list: (chunk, micro-batch) pairs
/// whose F has run and whose backward (B, or W of a split one) has not. 1F1B: min(pp - stage, m); GPipe: m;
/// AIAO: segments * m (Fold3D equation 7).
std::vector<int> peak_stash(const Schedule& schedule);

}  // namespace fold3d::core
