#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "core/ir/action.h"
#include "core/ir/schedule.h"

namespace fold3d::core {

class OptionalActions;

enum class Role : std::uint8_t {
  kCompute,  ///< the rank computes
  kSend,     ///< a result leaves for a neighbour's stage
  kRecv,     ///< a neighbour's result arrives
  kReduce,   ///< the replicas sum the chunk's gradients
  kCopy,     ///< something moves between device and pool, beside what the rank computes
};

/// Which schedules have the action, for every chunk and micro-batch.
enum class Occurs : std::uint8_t {
  kAlways,     ///< those of training and of evaluation
  kWhole,      ///< those of training, where the backward is one action
  kSplit,      ///< those of training, where the backward has two parts
  kForOthers,  ///< where other actions need it: transfers, sums
  kAtWill      ///< those of training, where somebody wants it
};

/// The other half of a transfer: 1SEND_F3 <-> 2RECV_F3.
struct OtherEnd {
  Kind kind;
  int chunk_offset;
};

/// What it takes on a chunk, in halves of the chunk's forward and of its whole backward.
struct Work {
  int forward = 0;
  int backward = 0;
  int backward_of_first = 0;  ///< in place of `backward` on chunk 0, whose input needs no gradient
};

/// What the rule of a kind may look at; see waits_for() in core/ir/deps.h.
struct Waiting {
  const Shape& shape;
  const Action& action;
  bool with_comm;
  const OptionalActions& present;
};

/// All there is to know about a kind of action before it runs: text, dependency rule, lowering, validator, simulators
/// and stash ask here. What the Executor does for it stands in runtime/executor/handlers.cpp.
struct ActionKind {
  Kind kind;
  std::string_view text;         ///< in schedules: "SEND_F"
  std::string_view python_name;  ///< of fold3d._C.Kind: "SEND_FORWARD"
  Role role;
  Occurs occurs = Occurs::kForOthers;
  bool has_micro_batch = true;             ///< false: one action for all micro-batches of a chunk
  std::optional<Kind> sent_by = {};        ///< the transfer that takes what it makes to a neighbour on another stage
  std::optional<OtherEnd> other_end = {};  ///< of a transfer
  int neighbour = 0;                       ///< of a copy: offset of the chunk that made what moves; 0: the same
  Work work = {};
  int stash = 0;  ///< by how many it changes the number of activations that wait for their backward
  std::vector<Action> (*waits_for)(const Waiting&);
};

/// The entry of `kind`; never moves.
const ActionKind& about(Kind kind);

/// Time of an action of `kind` on `chunk`, if the chunk's forward takes `forward` and its whole backward `backward`.
template <class Time>
Time time_of(Kind kind, int chunk, Time forward, Time backward) {
  const Work& work = about(kind).work;
  const int halves = chunk == 0 ? work.backward_of_first : work.backward;
  return static_cast<Time>(work.forward) * forward / 2 + static_cast<Time>(halves) * backward / 2;
}

}  // namespace fold3d::core
