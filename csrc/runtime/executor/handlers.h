// What a rank does for an action of each kind.
#pragma once

#include "core/ir/action.h"
#include "runtime/executor/run_state.h"

namespace fold3d::runtime {

/// Runs one action whose receives have arrived and whose earlier actions have run.
using Handler = void (*)(RunState&, const core::Action&);

/// The handler of `kind`.
Handler handler_of(core::Kind kind);

/// The message of `recv`, which landed in the pool, begins to come to the device.
void fetch_message(RunState& run, const core::Action& recv, const comm::Tensors& message);

}  // namespace fold3d::runtime
