#include "core/ir/deps.h"

#include <stdexcept>

#include "core/ir/action_kinds.h"

namespace fold3d::core {
namespace {

/// Whether a schedule may have the action or not, so that others wait for it only where it does.
bool is_optional(Kind kind) {
  const Occurs occurs = about(kind).occurs;
  return occurs == Occurs::kSplit || occurs == Occurs::kAtWill;
}

}  // namespace

OptionalActions::OptionalActions(const Schedule& schedule) : micro_batches_(schedule.shape.micro_batches) {
  const int num_chunks = schedule.shape.num_chunks();
  for (const auto& actions : schedule.ranks) {
    for (const Action& a : actions) {
      const bool inside = a.chunk >= 0 && a.chunk < num_chunks && a.micro_batch >= 0 && a.micro_batch < micro_batches_;
      if (!inside || !is_optional(a.kind)) continue;
      std::vector<bool>& of_kind = present_.at(static_cast<std::size_t>(a.kind));
      if (of_kind.empty()) of_kind.resize(static_cast<std::size_t>(num_chunks * micro_batches_));
      of_kind[static_cast<std::size_t>(a.chunk * micro_batches_ + a.micro_batch)] = true;
    }
  }
}

bool OptionalActions::has(const Action& action) const {
  const std::vector<bool>& of_kind = present_.at(static_cast<std::size_t>(action.kind));
  return !of_kind.empty() && of_kind[static_cast<std::size_t>(action.chunk * micro_batches_ + action.micro_batch)];
}

bool OptionalActions::is_split(int chunk, int micro_batch) const {
  return has({chunk, Kind::kBackwardInput, micro_batch});
}

Action OptionalActions::input_gradient(int chunk, int micro_batch) const {
  return {chunk, is_split(chunk, micro_batch) ? Kind::kBackwardInput : Kind::kBackward, micro_batch};
}

Action OptionalActions::last_backward(int chunk, int micro_batch) const {
  return {chunk, is_split(chunk, micro_batch) ? Kind::kBackwardWeight : Kind::kBackward, micro_batch};
}

std::vector<Action> waits_for(const Shape& shape, const Action& action, bool with_comm,
                              const OptionalActions& present) {
  return about(action.kind).waits_for({shape, action, with_comm, present});
}

Action other_end(const Action& transfer) {
  const auto& other = about(transfer.kind).other_end;
  if (!other) throw std::logic_error("other_end() asked for " + to_string(transfer) + ", which is no transfer");
  return {transfer.chunk + other->chunk_offset, other->kind, transfer.micro_batch};
}

std::optional<Action> send_after(const Shape& shape, const Action& action) {
  const auto send = about(action.kind).sent_by;
  if (!send) return std::nullopt;
  const int receiver = action.chunk + about(*send).other_end->chunk_offset;
  if (receiver < 0 || receiver >= shape.num_chunks()) return std::nullopt;
  if (shape.stage_of(receiver) == shape.stage_of(action.chunk)) return std::nullopt;
  return Action{action.chunk, *send, action.micro_batch};
}

}  // namespace fold3d::core
