#include "core/ir/stash.h"

#include <algorithm>

namespace fold3d::core {

std::vector<int> peak_stash(const Schedule& schedule) {
  std::vector<int> peaks;
  for (const auto& actions : schedule.ranks) {
    int stashed = 0;
    int peak = 0;
    for (const Action& action : actions) {
      if (action.kind == Kind::kForward) peak = std::max(peak, ++stashed);
      if (action.kind == Kind::kBackward || action.kind == Kind::kBackwardWeight) --stashed;
    }
    peaks.push_back(peak);
  }
  return peaks;
}

}  // namespace fold3d::core
