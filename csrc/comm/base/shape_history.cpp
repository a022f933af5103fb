#include "comm/base/shape_history.h"

#include <algorithm>

namespace fold3d::comm {
namespace {

constexpr int kMostNeeded = 1 << 20;

}  // namespace

void ShapeHistory::begin(bool trains) {
  for (auto& [key, entry] : entries_) {
    if (!entry.seen) continue;
    const bool missed = entry.expects && (entry.changed || !entry.alike);
    if (missed) entry.needed = std::min(2 * entry.needed, kMostNeeded);
    if (!entry.alike) {
      entry.steady = 0;
    } else {
      entry.steady = entry.changed ? 1 : entry.steady + 1;
    }
    entry.seen = entry.changed = false;
    entry.alike = true;
    entry.expects = entry.steady >= entry.needed;
  }
  trains_ = trains;
  missed_ = false;
}

const Shapes* ShapeHistory::expected(int chunk) const {
  const auto found = entries_.find({trains_, chunk});
  return missed_ || found == entries_.end() || !found->second.expects ? nullptr : &found->second.shapes;
}

void ShapeHistory::note(int chunk, const Shapes& shapes) {
  Entry& entry = entries_[{trains_, chunk}];
  if (entry.shapes != shapes) {
    if (entry.seen) {
      entry.alike = false;
    } else {
      entry.changed = true;
    }
    missed_ = missed_ || entry.expects;
    entry.shapes = shapes;
  }
  entry.seen = true;
}

}  // namespace fold3d::comm
