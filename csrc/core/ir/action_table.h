#pragma once

#include <cstddef>
#include <vector>

#include "core/ir/action_kinds.h"
#include "core/ir/schedule.h"

namespace fold3d::core {

/// Dense map Action -> T over all actions a shape can have. Actions must lie inside the shape (contains()).
template <class T>
class ActionTable {
 public:
  ActionTable(const Shape& shape, T initial)
      : shape_(shape),
        columns_(shape.micro_batches + 1),
        cells_(static_cast<std::size_t>(kNumKinds) * static_cast<std::size_t>(shape.num_chunks()) *
                   static_cast<std::size_t>(columns_),
               initial) {}

  bool contains(const Action& a) const {
    const bool number_fits = about(a.kind).has_micro_batch ? a.micro_batch >= 0 : a.micro_batch == -1;
    return a.chunk >= 0 && a.chunk < shape_.num_chunks() && number_fits && a.micro_batch < shape_.micro_batches;
  }
  T& operator[](const Action& a) { return cells_[index(a)]; }
  const T& operator[](const Action& a) const { return cells_[index(a)]; }

 private:
  std::size_t index(const Action& a) const {
    const int row = static_cast<int>(a.kind) * shape_.num_chunks() + a.chunk;
    return static_cast<std::size_t>(row) * static_cast<std::size_t>(columns_) +
           static_cast<std::size_t>(a.micro_batch + 1);
  }

  Shape shape_;
  int columns_;  // one column more than micro-batches: those of actions without one, which have -1
  std::vector<T> cells_;
};

}  // namespace fold3d::core
