#include "core/ir/stash.h"

#include <algorithm>

#include "core/ir/action_kinds.h"

namespace fold3d::core {

std::vector<int> peak_stash(const Schedule& schedule) {
  std::vector<int> peaks;
  for (const auto& actions : schedule.ranks) {
    int stashed = 0;
    int peak = 0;
    for (const Action& action : actions) {
      stashed += about(action.kind).stash;
      peak = std::max(peak, stashed);
    }
    peaks.push_back(peak);
  }
  return peaks;
}

}  // namespace fold3d::core
