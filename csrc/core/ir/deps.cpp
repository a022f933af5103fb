#include "core/ir/deps.h"

#include <stdexcept>

#include "core/ir/action_kinds.h"

namespace fold3d::core {

SplitBackward::SplitBackward(const Schedule& schedule) : micro_batches_(schedule.shape.micro_batches) {
  const int num_chunks = schedule.shape.num_chunks();
  for (const auto& actions : schedule.ranks) {
    for (const Action& a : actions) {
      if (a.kind != Kind::kBackwardInput || a.chunk >= num_chunks || a.micro_batch >= micro_batches_) continue;
      if (split_.empty()) split_.resize(static_cast<std::size_t>(num_chunks * micro_batches_));
      split_[static_cast<std::size_t>(a.chunk * micro_batches_ + a.micro_batch)] = true;
    }
  }
}

bool SplitBackward::operator()(int chunk, int micro_batch) const {
  return !split_.empty() && split_[static_cast<std::size_t>(chunk * micro_batches_ + micro_batch)];
}

Action SplitBackward::input_gradient(int chunk, int micro_batch) const {
  return {chunk, (*this)(chunk, micro_batch) ? Kind::kBackwardInput : Kind::kBackward, micro_batch};
}

Action SplitBackward::last_backward(int chunk, int micro_batch) const {
  return {chunk, (*this)(chunk, micro_batch) ? Kind::kBackwardWeight : Kind::kBackward, micro_batch};
}

std::vector<Action> waits_for(const Shape& shape, const Action& action, bool with_comm, const SplitBackward& split) {
  return about(action.kind).waits_for({shape, action, with_comm, split});
}

Action other_end(const Action& transfer) {
  const auto& other = about(transfer.kind).other_end;
  if (!other) throw std::logic_error("other_end() asked for " + to_string(transfer) + ", which is no transfer");
  return {transfer.chunk + other->chunk_offset, other->kind, transfer.micro_batch};
}

std::optional<Action> send_after(const Shape& shape, const Action& action) {
  const auto send = about(action.kind).sent_by;
  if (!send || shape.pp == 1) return std::nullopt;
  const int receiver = action.chunk + about(*send).other_end->chunk_offset;
  if (receiver < 0 || receiver >= shape.num_chunks()) return std::nullopt;
  return Action{action.chunk, *send, action.micro_batch};
}

}  // namespace fold3d::core
