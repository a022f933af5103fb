#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "simdevice/operators/operator_facts.h"

namespace simdevice {

/// Sizes of an operator's results.
struct Geometry {
  struct Shape {
    std::vector<std::int64_t> sizes, strides;
    c10::ScalarType dtype;
  };
  enum class Kind { kUndefined, kTensor, kList };
  struct Value {
    Kind kind = Kind::kUndefined;
    std::vector<Shape> tensors;
  };
  std::vector<Value> returns;                      // of each return value that is new
  std::vector<std::vector<std::int64_t>> written;  // with `out` arguments: sizes of each tensor that is written to
};

/// What the operator's meta kernel says of these arguments; kept, because those in Python take a millisecond. Null
/// where there is none, where sizes depend on values, and where the arguments are wrong: the CPU kernel will say how.
std::shared_ptr<const Geometry> geometry_of(const c10::OperatorHandle& op, const OperatorFacts& facts,
                                            const c10::IValue* arguments);

}  // namespace simdevice
