#pragma once

#include <string>
#include <vector>

#include "comm/base/tensor.h"
#include "core/ir/action.h"

namespace fold3d::comm {

/// Host memory in which messages wait that the rank does not use soon, so that no sender waits for memory of the
/// receiver's device (lazy inter-segment communication, Fold3D V-C).
class Landing {
 public:
  virtual ~Landing() = default;

  /// Memory for the tensors of a message; blocks until there is room. Called by a receiving thread. Throws when there
  /// will be none, and AbortedError after abort().
  virtual Tensors take(const core::Action& recv, const std::vector<TensorDesc>& descs) = 0;

  /// What take() returned is filled. Likewise.
  virtual void filled(const core::Action& recv, const Tensors& tensors) = 0;

  /// The program has come to this RECV; may be called more than once. By the thread that walks it; never blocks.
  virtual void due(const core::Action& recv) = 0;

  /// A blocked take(), and all later ones, throw AbortedError(reason). Any thread.
  virtual void abort(const std::string& reason) noexcept = 0;
};

}  // namespace fold3d::comm
