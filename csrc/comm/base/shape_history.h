#pragma once

#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include "comm/base/tensor.h"

namespace fold3d::comm {

using Shapes = std::vector<TensorDesc>;

/// What the messages of one queue look like, as far as the steps before tell. The two ends of a link see the same
/// messages, so at every message both expect the same.
///
/// A chunk's messages are expected to look as in the last steps of the same kind (training or not) if they all looked
/// alike there. The first message that does not look as expected ends that for the step, for all chunks of the queue;
/// after it twice as many steps must be alike as before.
class ShapeHistory {
 public:
  /// A step begins, called between two steps. `trains`: whether it has backwards.
  void begin(bool trains);

  /// Of the next message, of a chunk; null: anything.
  const Shapes* expected(int chunk) const;

  /// The next message looks like this.
  void note(int chunk, const Shapes& shapes);

 private:
  struct Entry {
    Shapes shapes;
    bool seen = false;     // in this step
    bool alike = true;     // all of this step
    bool changed = false;  // in this step, from the step before
    int steady = 0;        // steps in a row that were alike
    int needed = 2;        // of those, before anything is expected
    bool expects = false;  // in this step
  };

  std::map<std::pair<bool, int>, Entry> entries_;  // by (trains, chunk)
  bool trains_ = false;
  bool missed_ = false;  // in this step
};

}  // namespace fold3d::comm
