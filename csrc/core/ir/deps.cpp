#include "core/ir/deps.h"

#include <stdexcept>

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
  const int c = action.chunk;
  const int i = action.micro_batch;
  const int last = shape.num_chunks() - 1;
  const auto through_link = [&](int neighbour) { return with_comm && shape.stage_of(neighbour) != shape.stage_of(c); };
  switch (action.kind) {
    case Kind::kForward:
      if (c == 0) return {};
      if (through_link(c - 1)) return {{c, Kind::kRecvForward, i}};
      return {{c - 1, Kind::kForward, i}};
    case Kind::kBackward:
    case Kind::kBackwardInput: {
      const Action forward{c, Kind::kForward, i};
      if (c == last) return {forward};
      if (through_link(c + 1)) return {forward, {c, Kind::kRecvBackward, i}};
      return {forward, split.input_gradient(c + 1, i)};
    }
    case Kind::kBackwardWeight:
      return {{c, Kind::kBackwardInput, i}};
    case Kind::kSendForward:
      return {{c, Kind::kForward, i}};
    case Kind::kSendBackward:
      return {split.input_gradient(c, i)};
    case Kind::kRecvForward:
    case Kind::kRecvBackward:
      if (c == (action.kind == Kind::kRecvForward ? 0 : last)) {
        throw std::invalid_argument(to_string(action) + " has no sender: chunk " + std::to_string(c) + " is the " +
                                    (c == 0 ? "first" : "last") + " chunk of " + to_string(shape));
      }
      return {other_end(action)};
    case Kind::kReduce: {
      std::vector<Action> waits;
      for (int j = 0; j < shape.micro_batches; ++j) waits.push_back(split.last_backward(c, j));
      return waits;
    }
  }
  throw std::logic_error("unknown kind of action");
}

Action other_end(const Action& transfer) {
  switch (transfer.kind) {
    case Kind::kSendForward:
      return {transfer.chunk + 1, Kind::kRecvForward, transfer.micro_batch};
    case Kind::kRecvForward:
      return {transfer.chunk - 1, Kind::kSendForward, transfer.micro_batch};
    case Kind::kSendBackward:
      return {transfer.chunk - 1, Kind::kRecvBackward, transfer.micro_batch};
    case Kind::kRecvBackward:
      return {transfer.chunk + 1, Kind::kSendBackward, transfer.micro_batch};
    default:
      throw std::logic_error("other_end() asked for " + to_string(transfer) + ", which is no transfer");
  }
}

std::optional<Action> send_after(const Shape& shape, const Action& action) {
  const bool forward = action.kind == Kind::kForward;
  if (!forward && action.kind != Kind::kBackward && action.kind != Kind::kBackwardInput) return std::nullopt;
  if (shape.pp == 1 || action.chunk == (forward ? shape.num_chunks() - 1 : 0)) return std::nullopt;
  return Action{action.chunk, forward ? Kind::kSendForward : Kind::kSendBackward, action.micro_batch};
}

}  // namespace fold3d::core
