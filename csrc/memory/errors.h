#pragma once

#include <stdexcept>

namespace fold3d::memory {

/// The pool cannot be had or used: the text names the bytes, what there is and the setting to change.
class PoolError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace fold3d::memory
