// The passes of lowering: each adds one kind of action to a schedule. Their order stands in core/passes/lower.cpp.
#pragma once

#include <vector>

#include "core/ir/schedule.h"

namespace fold3d::core {

/// What a schedule gets beside sends and receives. Default: nothing.
struct LoweringOptions {
  bool reduce = false;  ///< the replicas sum gradients
  std::vector<bool> recompute =
      {};  ///< of every chunk: no graph is kept between forward and backward; empty: all keep it
};

/// Takes a schedule that is valid and that the passes before have seen.
using Pass = Schedule (*)(const Schedule&, const LoweringOptions&);

namespace passes {

/// core/passes/send_recv.cpp. Keeps compute actions only, and adds SEND and RECV.
Schedule send_recv(const Schedule& compute_only, const LoweringOptions& options);

/// core/passes/recompute.cpp. Adds RECOMPUTE where asked.
Schedule recompute(const Schedule& lowered, const LoweringOptions& options);

/// core/passes/reduce.cpp. Adds REDUCE_GRAD where asked.
Schedule reduce(const Schedule& lowered, const LoweringOptions& options);

}  // namespace passes
}  // namespace fold3d::core
