#include "core/passes/validate.h"

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "core/ir/action_kinds.h"
#include "core/ir/action_table.h"
#include "core/ir/deps.h"
#include "core/ir/stash.h"
#include "core/ir/versions.h"
#include "core/passes/grid.h"

namespace fold3d::core {
namespace {

[[noreturn]] void fail(const Schedule& schedule, Cell cell, const std::string& message) {
  throw std::invalid_argument(grid(schedule, cell, "invalid schedule (" + to_string(schedule.shape) + "): " + message));
}

std::string on_rank(const Action& action, int rank) { return to_string(action) + " on rank " + std::to_string(rank); }

/// Where each action stands: step in its rank's list, or kAbsent.
using Positions = ActionTable<int>;
constexpr int kAbsent = -1;

// ---- 1. inside the shape, on the right rank, once ----

Positions positions_of(const Schedule& schedule) {
  const Shape& shape = schedule.shape;
  Positions positions(shape, kAbsent);
  for (int rank = 0; rank < shape.pp; ++rank) {
    const auto& actions = schedule.ranks[static_cast<std::size_t>(rank)];
    for (int step = 0; step < static_cast<int>(actions.size()); ++step) {
      const Action& action = actions[static_cast<std::size_t>(step)];
      const Cell cell{rank, step};
      if (!positions.contains(action)) {
        fail(schedule, cell,
             to_string(action) + " lies outside: chunks are 0.." + std::to_string(shape.num_chunks() - 1) +
                 ", micro-batches 0.." + std::to_string(shape.micro_batches - 1));
      }
      if (shape.stage_of(action.chunk) != rank) {
        fail(schedule, cell,
             on_rank(action, rank) + ": chunk " + std::to_string(action.chunk) + " belongs to rank " +
                 std::to_string(shape.stage_of(action.chunk)) +
                 (shape.style == Style::kLoop ? " (chunk % pp)" : " (style v)"));
      }
      if (positions[action] != kAbsent) {
        fail(schedule, cell,
             on_rank(action, rank) + " occurs twice, first in step " + std::to_string(positions[action]));
      }
      positions[action] = step;
    }
  }
  return positions;
}

// ---- 2. nothing missing, nothing idle ----

/// Marks the place where a missing action was needed first: the first action of its rank that waits for it,
/// else the end of the rank.
Cell place_of_missing(const Schedule& schedule, const Action& missing, bool with_comm, const OptionalActions& present) {
  const int rank = schedule.shape.stage_of(missing.chunk);
  const auto& actions = schedule.ranks[static_cast<std::size_t>(rank)];
  for (int step = 0; step < static_cast<int>(actions.size()); ++step) {
    const auto waits = waits_for(schedule.shape, actions[static_cast<std::size_t>(step)], with_comm, present);
    if (std::find(waits.begin(), waits.end(), missing) != waits.end()) return {rank, step};
  }
  return {rank, static_cast<int>(actions.size())};
}

struct Extent {
  bool forward_only;
  bool with_comm;
  bool with_reduce;
};

bool occurs(Occurs where, const Extent& extent, bool is_split) {
  switch (where) {
    case Occurs::kAlways:
      return true;
    case Occurs::kWhole:
      return !extent.forward_only && !is_split;
    case Occurs::kSplit:
      return !extent.forward_only && is_split;
    case Occurs::kForOthers:
    case Occurs::kAtWill:
      return false;
  }
  return false;
}

std::vector<Action> needed_actions(const Shape& shape, const Extent& extent, const OptionalActions& present) {
  std::vector<Action> needed;
  for (int chunk = 0; chunk < shape.num_chunks(); ++chunk) {
    for (int i = 0; i < shape.micro_batches; ++i) {
      for (int k = 0; k < kNumKinds; ++k) {
        const Action action{chunk, static_cast<Kind>(k), i};
        if (!occurs(about(action.kind).occurs, extent, present.is_split(chunk, i))) continue;
        needed.push_back(action);
        const auto send = send_after(shape, action);
        if (!extent.with_comm || !send) continue;
        needed.push_back(*send);
        needed.push_back(other_end(*send));
      }
    }
    if (extent.with_reduce) needed.push_back({chunk, Kind::kReduce, -1});
  }
  return needed;
}

/// What brings back what `copy` takes away, or takes away what it brings; but for messages, which arrive in the pool.
std::vector<Action> ways_of(const Shape& shape, const Action& copy) {
  const auto both = [&](Kind out, Kind in) -> std::vector<Action> {
    const int maker = copy.chunk + about(out).neighbour;
    if (shape.stage_of(maker) != shape.stage_of(copy.chunk)) return {{copy.chunk, in, copy.micro_batch}};
    return {{copy.chunk, out, copy.micro_batch}, {copy.chunk, in, copy.micro_batch}};
  };
  switch (about(copy.kind).neighbour) {
    case -1:
      return both(Kind::kOffloadForward, Kind::kPrefetchForward);
    case 1:
      return both(Kind::kOffloadBackward, Kind::kPrefetchBackward);
    default:
      return both(Kind::kOffload, Kind::kPrefetch);
  }
}

/// Both ways of everything that goes one of them.
std::vector<Action> needed_copies(const Schedule& schedule) {
  std::vector<Action> needed;
  for (const auto& actions : schedule.ranks) {
    for (const Action& action : actions) {
      if (!is_copy(action.kind)) continue;
      const std::vector<Action> ways = ways_of(schedule.shape, action);
      needed.insert(needed.end(), ways.begin(), ways.end());
    }
  }
  return needed;
}

std::string why_not_needed(const Action& action, const Extent& extent) {
  if (is_send(action.kind) || is_recv(action.kind)) return " has no other end: no result crosses a stage border there";
  if (extent.forward_only) return " does not belong into a forward-only schedule";
  if (is_copy(action.kind)) return " has nothing to take away: a message brings it, and that arrives in the pool";
  return " does not go together with I and W: a backward is either B, or I and W";
}

void check_complete(const Schedule& schedule, const Positions& positions, bool forward_only,
                    const OptionalActions& present) {
  Extent extent{forward_only, has_comm(schedule), false};
  for (int chunk = 0; chunk < schedule.shape.num_chunks() && !forward_only; ++chunk) {
    extent.with_reduce = extent.with_reduce || positions[{chunk, Kind::kReduce, -1}] != kAbsent;
  }
  ActionTable<char> is_needed(schedule.shape, 0);
  std::vector<Action> needed = needed_actions(schedule.shape, extent, present);
  if (!forward_only) {
    const std::vector<Action> copies = needed_copies(schedule);
    needed.insert(needed.end(), copies.begin(), copies.end());
  }
  for (const Action& action : needed) {
    is_needed[action] = 1;
    if (positions[action] == kAbsent) {
      fail(schedule, place_of_missing(schedule, action, extent.with_comm, present),
           on_rank(action, schedule.shape.stage_of(action.chunk)) + " is missing");
    }
  }
  for (int rank = 0; rank < schedule.shape.pp; ++rank) {
    for (const Action& action : schedule.ranks[static_cast<std::size_t>(rank)]) {
      const bool at_will = about(action.kind).occurs == Occurs::kAtWill && !is_copy(action.kind);
      if (is_needed[action] || (at_will && !forward_only)) continue;
      fail(schedule, {rank, positions[action]}, on_rank(action, rank) + why_not_needed(action, extent));
    }
  }
}

// ---- 3. runs in this order ----

/// Runs all lists at once, each in its own order, until the end or until nobody can go on.
class Replay {
 public:
  /// `per_step`: micro-batches after which weights are updated, without a flush; 0: the schedule is one step.
  Replay(const Schedule& schedule, const Positions& positions, bool with_comm, const OptionalActions& present,
         int per_step)
      : schedule_(schedule),
        positions_(positions),
        with_comm_(with_comm),
        present_(present),
        per_step_(per_step),
        done_(schedule.shape, 0),
        next_(schedule.ranks.size(), 0) {}

  void run() {
    for (bool progress = true; progress;) {
      progress = false;
      for (int rank = 0; rank < schedule_.shape.pp; ++rank) {
        while (advance(rank)) progress = true;
      }
    }
    for (int rank = 0; rank < schedule_.shape.pp; ++rank) {
      if (head(rank) != nullptr) explain(rank);
    }
  }

 private:
  const Action* head(int rank) const {
    const auto& actions = schedule_.ranks[static_cast<std::size_t>(rank)];
    const std::size_t step = next_[static_cast<std::size_t>(rank)];
    return step < actions.size() ? &actions[step] : nullptr;
  }
  int owner(const Action& action) const { return schedule_.shape.stage_of(action.chunk); }
  void complete(const Action& action) {
    done_[action] = 1;
    ++next_[static_cast<std::size_t>(owner(action))];
  }

  /// What keeps the head of a rank from running; nullptr if nothing does. A SEND also waits until its RECV is
  /// at the head of its rank; a RECV is completed by its SEND.
  bool blocker(const Action& action, Action* found) const {
    if (!is_recv(action.kind)) {
      std::vector<Action> waits = waits_for(schedule_.shape, action, with_comm_, present_);
      if (per_step_ > 0) {
        const std::vector<Action> updates = version_waits(schedule_.shape, action, per_step_, present_);
        waits.insert(waits.end(), updates.begin(), updates.end());
      }
      for (const Action& wait : waits) {
        if (done_[wait]) continue;
        *found = wait;
        return true;
      }
    }
    if (!is_send(action.kind) && !is_recv(action.kind)) return false;
    *found = other_end(action);
    const Action* other = head(owner(*found));
    return is_recv(action.kind) || other == nullptr || *other != *found;
  }

  bool advance(int rank) {
    const Action* action = head(rank);
    Action found;
    if (action == nullptr || blocker(*action, &found)) return false;
    if (is_send(action->kind)) complete(other_end(*action));
    complete(*action);
    return true;
  }

  /// Follows "waits for" from one stuck head to the next until an action comes after its own waiter in the
  /// same list, or a rank repeats.
  [[noreturn]] void explain(int rank) const {
    std::string chain;
    std::vector<bool> seen(next_.size(), false);
    for (;;) {
      const Action& action = *head(rank);
      Action wait;
      blocker(action, &wait);
      const int step = static_cast<int>(next_[static_cast<std::size_t>(rank)]);
      if (owner(wait) == rank) {
        fail(schedule_, {rank, step},
             on_rank(action, rank) + " comes before " + to_string(wait) + " (step " + std::to_string(positions_[wait]) +
                 "), which it waits for");
      }
      if (seen[static_cast<std::size_t>(rank)]) fail(schedule_, {rank, step}, "deadlock: " + chain);
      seen[static_cast<std::size_t>(rank)] = true;
      chain += (chain.empty() ? "" : "; ") + on_rank(action, rank) + " waits for " + on_rank(wait, owner(wait));
      rank = owner(wait);
    }
  }

  const Schedule& schedule_;
  const Positions& positions_;
  bool with_comm_;
  const OptionalActions& present_;
  int per_step_;
  ActionTable<char> done_;
  std::vector<std::size_t> next_;
};

void validate(const Schedule& schedule, bool forward_only, int per_step) {
  const Shape& shape = schedule.shape;
  if (shape.pp < 1 || shape.segments < 1 || shape.micro_batches < 1 ||
      static_cast<int>(schedule.ranks.size()) != shape.pp) {
    throw std::invalid_argument("invalid schedule (" + to_string(shape) + "): it has lists for " +
                                std::to_string(schedule.ranks.size()) +
                                " ranks, and pp, segments and m must be at least 1");
  }
  const Positions positions = positions_of(schedule);
  const OptionalActions present(schedule);
  for (int rank = 0; rank < shape.pp; ++rank) {
    for (const Action& action : schedule.ranks[static_cast<std::size_t>(rank)]) {
      const bool crosses = is_copy(action.kind) && about(action.kind).neighbour != 0;
      if (!is_recv(action.kind) && !crosses) continue;
      const int other = crosses ? action.chunk + about(action.kind).neighbour : other_end(action).chunk;
      if (other >= 0 && other < shape.num_chunks()) continue;
      fail(schedule, {rank, positions[action]},
           on_rank(action, rank) + (crosses ? " has nothing to move: there is no such border" : " has no sender"));
    }
  }
  check_complete(schedule, positions, forward_only, present);
  Replay(schedule, positions, has_comm(schedule), present, per_step).run();
}

}  // namespace

void validate_room(const Schedule& schedule, const Room& room) {
  const std::vector<StashPeak> peaks = stash_peaks(schedule, room.stash_bytes, room.sent_bytes);
  const std::string unit = room.stash_bytes.empty() ? " stashes" : " bytes of stashes";
  for (std::size_t rank = 0; rank < peaks.size(); ++rank) {
    const auto check = [&](std::int64_t needed, std::optional<std::int64_t> there, const char* where) {
      if (!there || needed <= *there) return;
      throw std::invalid_argument("no room (" + to_string(schedule.shape) + "): rank " + std::to_string(rank) +
                                  " holds " + std::to_string(needed) + unit + " at once " + where +
                                  ", where there is room for " + std::to_string(*there));
    };
    check(peaks[rank].device, room.device, "on its device");
    check(peaks[rank].pool, room.pool, "in its pool");
  }
}

void validate(const Schedule& schedule, bool forward_only) { validate(schedule, forward_only, 0); }

void validate_steps(const Schedule& steps, int micro_batches) {
  validate(steps, /*forward_only=*/false, micro_batches);
}

}  // namespace fold3d::core
