#include "core/ir/action_kinds.h"

#include <array>
#include <stdexcept>

#include "core/ir/deps.h"

namespace fold3d::core {
namespace {

/// Whether what the action's chunk needs of its `neighbour` comes in a message.
bool through_link(const Waiting& now, int neighbour) {
  return now.with_comm && now.shape.stage_of(neighbour) != now.shape.stage_of(now.action.chunk);
}

void add_if_present(std::vector<Action>& waits, const Waiting& now, Kind kind) {
  const Action action{now.action.chunk, kind, now.action.micro_batch};
  if (now.present.has(action)) waits.push_back(action);
}

std::vector<Action> input(const Waiting& now) {
  const auto [chunk, kind, i] = now.action;
  if (chunk == 0) return {};
  std::vector<Action> waits{through_link(now, chunk - 1) ? Action{chunk, Kind::kRecvForward, i}
                                                         : Action{chunk - 1, Kind::kForward, i}};
  add_if_present(waits, now, Kind::kPrefetchForward);
  return waits;
}

std::vector<Action> stash(const Waiting& now) {
  const auto [chunk, kind, i] = now.action;
  std::vector<Action> waits{{chunk, Kind::kForward, i}};
  add_if_present(waits, now, Kind::kPrefetch);
  return waits;
}

std::vector<Action> forward_and_output_gradient(const Waiting& now) {
  const auto [chunk, kind, i] = now.action;
  std::vector<Action> waits = stash(now);
  add_if_present(waits, now, Kind::kRecompute);
  if (chunk == now.shape.num_chunks() - 1) return waits;
  const bool arrives = through_link(now, chunk + 1);
  waits.push_back(arrives ? Action{chunk, Kind::kRecvBackward, i} : now.present.input_gradient(chunk + 1, i));
  add_if_present(waits, now, Kind::kPrefetchBackward);
  return waits;
}

std::vector<Action> output(const Waiting& now) { return {{now.action.chunk, Kind::kForward, now.action.micro_batch}}; }

std::vector<Action> input_gradient(const Waiting& now) {
  return {now.present.input_gradient(now.action.chunk, now.action.micro_batch)};
}

std::vector<Action> sender(const Waiting& now) {
  const Action send = other_end(now.action);
  if (send.chunk < 0 || send.chunk >= now.shape.num_chunks()) {
    throw std::invalid_argument(to_string(now.action) + " has no sender: chunk " + std::to_string(now.action.chunk) +
                                " is the " + (send.chunk < 0 ? "first" : "last") + " chunk of " + to_string(now.shape));
  }
  return {send};
}

std::vector<Action> all_gradients(const Waiting& now) {
  std::vector<Action> waits;
  for (int i = 0; i < now.shape.micro_batches; ++i) waits.push_back(now.present.last_backward(now.action.chunk, i));
  return waits;
}

std::vector<Action> offload(const Waiting& now) { return {{now.action.chunk, Kind::kOffload, now.action.micro_batch}}; }

/// The chunk that makes what a copy of a border moves.
int maker(const Waiting& now) {
  const int chunk = now.action.chunk + about(now.action.kind).neighbour;
  if (chunk >= 0 && chunk < now.shape.num_chunks()) return chunk;
  throw std::invalid_argument(to_string(now.action) + " has nothing to move: chunk " +
                              std::to_string(now.action.chunk) + " is the " + (chunk < 0 ? "first" : "last") +
                              " chunk of " + to_string(now.shape));
}

std::vector<Action> made_here(const Waiting& now) {
  const int chunk = maker(now);
  if (chunk < now.action.chunk) return {{chunk, Kind::kForward, now.action.micro_batch}};
  return {now.present.input_gradient(chunk, now.action.micro_batch)};
}

std::vector<Action> in_pool(const Waiting& now) {
  const auto [chunk, kind, i] = now.action;
  const bool forward = kind == Kind::kPrefetchForward;
  if (through_link(now, maker(now))) return {{chunk, forward ? Kind::kRecvForward : Kind::kRecvBackward, i}};
  return {{chunk, forward ? Kind::kOffloadForward : Kind::kOffloadBackward, i}};
}

constexpr std::array<ActionKind, kNumKinds> kKinds = {{
    {.kind = Kind::kForward,
     .text = "F",
     .python_name = "FORWARD",
     .role = Role::kCompute,
     .occurs = Occurs::kAlways,
     .sent_by = Kind::kSendForward,
     .work = {.forward = 2},
     .stash = 1,
     .waits_for = input},
    {.kind = Kind::kBackward,
     .text = "B",
     .python_name = "BACKWARD",
     .role = Role::kCompute,
     .occurs = Occurs::kWhole,
     .sent_by = Kind::kSendBackward,
     .work = {.backward = 2, .backward_of_first = 2},
     .stash = -1,
     .waits_for = forward_and_output_gradient},
    {.kind = Kind::kBackwardInput,
     .text = "I",
     .python_name = "BACKWARD_INPUT",
     .role = Role::kCompute,
     .occurs = Occurs::kSplit,
     .sent_by = Kind::kSendBackward,
     .work = {.backward = 1, .backward_of_first = 0},
     .waits_for = forward_and_output_gradient},
    {.kind = Kind::kBackwardWeight,
     .text = "W",
     .python_name = "BACKWARD_WEIGHT",
     .role = Role::kCompute,
     .occurs = Occurs::kSplit,
     .work = {.backward = 1, .backward_of_first = 2},
     .stash = -1,
     .waits_for = input_gradient},
    {.kind = Kind::kSendForward,
     .text = "SEND_F",
     .python_name = "SEND_FORWARD",
     .role = Role::kSend,
     .other_end = OtherEnd{Kind::kRecvForward, 1},
     .waits_for = output},
    {.kind = Kind::kRecvForward,
     .text = "RECV_F",
     .python_name = "RECV_FORWARD",
     .role = Role::kRecv,
     .other_end = OtherEnd{Kind::kSendForward, -1},
     .waits_for = sender},
    {.kind = Kind::kSendBackward,
     .text = "SEND_B",
     .python_name = "SEND_BACKWARD",
     .role = Role::kSend,
     .other_end = OtherEnd{Kind::kRecvBackward, -1},
     .waits_for = input_gradient},
    {.kind = Kind::kRecvBackward,
     .text = "RECV_B",
     .python_name = "RECV_BACKWARD",
     .role = Role::kRecv,
     .other_end = OtherEnd{Kind::kSendBackward, 1},
     .waits_for = sender},
    {.kind = Kind::kReduce,
     .text = "REDUCE_GRAD",
     .python_name = "REDUCE",
     .role = Role::kReduce,
     .has_micro_batch = false,
     .waits_for = all_gradients},
    {.kind = Kind::kRecompute,
     .text = "RECOMPUTE",
     .python_name = "RECOMPUTE",
     .role = Role::kCompute,
     .occurs = Occurs::kAtWill,
     .work = {.forward = 2},
     .waits_for = stash},
    {.kind = Kind::kOffload,
     .text = "OFFLOAD",
     .python_name = "OFFLOAD",
     .role = Role::kCopy,
     .occurs = Occurs::kAtWill,
     .waits_for = output},
    {.kind = Kind::kPrefetch,
     .text = "PREFETCH",
     .python_name = "PREFETCH",
     .role = Role::kCopy,
     .occurs = Occurs::kAtWill,
     .waits_for = offload},
    {.kind = Kind::kOffloadForward,
     .text = "OFFLOAD_F",
     .python_name = "OFFLOAD_FORWARD",
     .role = Role::kCopy,
     .occurs = Occurs::kAtWill,
     .neighbour = -1,
     .waits_for = made_here},
    {.kind = Kind::kPrefetchForward,
     .text = "PREFETCH_F",
     .python_name = "PREFETCH_FORWARD",
     .role = Role::kCopy,
     .occurs = Occurs::kAtWill,
     .neighbour = -1,
     .waits_for = in_pool},
    {.kind = Kind::kOffloadBackward,
     .text = "OFFLOAD_B",
     .python_name = "OFFLOAD_BACKWARD",
     .role = Role::kCopy,
     .occurs = Occurs::kAtWill,
     .neighbour = 1,
     .waits_for = made_here},
    {.kind = Kind::kPrefetchBackward,
     .text = "PREFETCH_B",
     .python_name = "PREFETCH_BACKWARD",
     .role = Role::kCopy,
     .occurs = Occurs::kAtWill,
     .neighbour = 1,
     .waits_for = in_pool},
}};

constexpr bool in_order() {
  for (std::size_t k = 0; k < kKinds.size(); ++k) {
    if (kKinds[k].kind != static_cast<Kind>(k)) return false;
  }
  return true;
}
static_assert(in_order(), "one entry for each Kind, in the order of the enumeration");

}  // namespace

const ActionKind& about(Kind kind) { return kKinds.at(static_cast<std::size_t>(kind)); }

}  // namespace fold3d::core
