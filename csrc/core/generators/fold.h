#pragma once

#include "core/ir/schedule.h"

namespace fold3d::core {

/// How the last segment of a group turns from forward to backward.
enum class Turn {
  kAll,       ///< all forwards of the group in the last segment, then its backwards
  kOneFOneB,  ///< one forward, one backward
};

/// The family fold(segments, N, turn). The m micro-batches are divided into max(1, m / N) groups whose sizes
/// differ by at most one (so exactly N each where N divides m, and never fewer than N where m >= N). Each
/// group passes segment 0, 1, ... forward and ..., 1, 0 backward; its backwards mix with forwards of later
/// groups.
///   gpipe = (1, m, all); kFkB = (1, k, all) (Ada-Grouper section 4); 1f1b = (1, any, 1f1b) = (1, 1, all);
///   interleaved 1F1B of Megatron = (ns, pp, 1f1b); AIAO = (ns, m, all) (Fold3D III-B).
/// Deadlock-free for all sizes by construction (see fold.cpp).
Schedule fold_order(const Shape& shape, int group_size, Turn turn);

}  // namespace fold3d::core
