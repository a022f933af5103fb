#pragma once

#include <vector>

namespace fold3d::core {

/// Divides items 0..n-1 into `parts` contiguous, non-empty parts: result[k] is the first item of part k,
/// result[0] == 0, ascending. The largest part (sum of its costs) is as small as it can be; among those
/// divisions the sum of the squared part costs is the smallest, so the other parts are even, too. Exact
/// dynamic programme, O(parts n^2); pure. cost: one non-negative finite number per item. weights: of each part, by
/// which the cost of what is in it is multiplied; empty: 1. Throws std::invalid_argument unless 1 <= parts <= n.
std::vector<int> partition(const std::vector<double>& cost, int parts, const std::vector<double>& weights = {});

}  // namespace fold3d::core
