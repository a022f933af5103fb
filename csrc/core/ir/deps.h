#pragma once

#include <array>
#include <optional>
#include <vector>

#include "core/ir/schedule.h"

namespace fold3d::core {

/// Which actions a schedule has that another one may lack: I and W in place of B, RECOMPUTE, copies. Default: none.
class OptionalActions {
 public:
  OptionalActions() = default;
  /// Reads it off a schedule. Actions outside the shape are ignored.
  explicit OptionalActions(const Schedule& schedule);

  /// Whether the schedule has `action`, which lies inside its shape and is optional.
  bool has(const Action& action) const;
  /// Whether the backward is split into I and W instead of one B.
  bool is_split(int chunk, int micro_batch) const;
  /// The action that gives the gradient of the chunk's input: I where split, else B.
  Action input_gradient(int chunk, int micro_batch) const;
  /// The action after which the chunk has nothing left to do for this micro-batch: W where split, else B.
  Action last_backward(int chunk, int micro_batch) const;

 private:
  int micro_batches_ = 0;
  std::array<std::vector<bool>, kNumKinds> present_;  // [kind][chunk * micro_batches_ + micro_batch]; empty = none
};

/// THE dependency rule: the actions that must be complete, anywhere, before `action` may start. Lowering,
/// validator, simulator and Executor all ask here. with_comm: the schedule has been lowered, so data from
/// another stage comes through its RECV.
///   F(c,i):      F(c-1,i), or RECV_F(c,i) if chunk c-1 is on another stage and with_comm; nothing if c == 0; also
///   PREFETCH_F(c,i) where there is one
///   OFFLOAD(c,i): F(c,i);   PREFETCH(c,i): OFFLOAD(c,i)
///   OFFLOAD_F(c,i): F(c-1,i), on the same stage;   PREFETCH_F(c,i): that, or RECV_F(c,i) from another stage
///   OFFLOAD_B(c,i): B|I(c+1,i), on the same stage;   PREFETCH_B(c,i): that, or RECV_B(c,i) from another stage
///   RECOMPUTE(c,i): F(c,i), PREFETCH(c,i) where there is one
///   B or I(c,i): F(c,i), PREFETCH(c,i) and RECOMPUTE(c,i) where there is one; also B|I(c+1,i), or RECV_B(c,i)
///                likewise, unless c is the last chunk, with PREFETCH_B(c,i) where there is one
///   W(c,i):      I(c,i)
///   SEND_F(c,i): F(c,i);    RECV_F(c,i): SEND_F(c-1,i)
///   SEND_B(c,i): B|I(c,i);  RECV_B(c,i): SEND_B(c+1,i)
///   REDUCE(c):   B|W(c,i) of every micro-batch i
/// `action` must lie inside the shape. Pure; any thread. Throws std::invalid_argument for a RECV_F or PREFETCH_F of the
/// first or a RECV_B or PREFETCH_B of the last chunk, which nothing can feed.
std::vector<Action> waits_for(const Shape& shape, const Action& action, bool with_comm,
                              const OptionalActions& present = {});

/// The other end of a SEND or RECV: 1SEND_F3 <-> 2RECV_F3, 2SEND_B3 <-> 1RECV_B3.
Action other_end(const Action& transfer);

/// The SEND that takes the result of `action` to another stage: after F of any but the last chunk, after B or
/// I of any but the first, unless the neighbour lives on the same stage. Nothing for other actions.
std::optional<Action> send_after(const Shape& shape, const Action& action);

}  // namespace fold3d::core
