#include "core/memory/memory_curve.h"

#include <algorithm>
#include <array>
#include <deque>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "core/ir/action_kinds.h"
#include "core/ir/deps.h"
#include "core/ir/stash.h"
#include "core/passes/head.h"

namespace fold3d::core {
namespace {

std::size_t at(int number) { return static_cast<std::size_t>(number); }

/// Beside the uses of the device.
constexpr std::size_t kPool = kNumMemoryUses;

/// More or fewer bytes of one use, or in the pool, from a moment on.
struct Change {
  std::int64_t time_ns;
  std::size_t use;
  std::int64_t bytes;
};

class Stage {
 public:
  void add(std::int64_t time_ns, MemoryUse use, std::int64_t bytes) {
    if (bytes != 0) changes_.push_back({time_ns, static_cast<std::size_t>(use), bytes});
  }
  void hold(std::int64_t from_ns, std::int64_t until_ns, MemoryUse use, std::int64_t bytes) {
    add(from_ns, use, bytes);
    add(until_ns, use, -bytes);
  }
  void lie_in_pool(std::int64_t from_ns, std::int64_t until_ns, std::int64_t bytes) {
    if (bytes == 0) return;
    changes_.push_back({from_ns, kPool, bytes});
    changes_.push_back({until_ns, kPool, -bytes});
  }
  /// Buffers of the pool of received messages: they stay for the next ones.
  void receive(std::int64_t from_ns, std::int64_t until_ns, std::int64_t bytes) {
    if (bytes == 0) return;
    received_.emplace_back(from_ns, bytes);
    received_.emplace_back(until_ns, -bytes);
  }

  StageMemory finish(bool points) {
    std::sort(received_.begin(), received_.end());  // at one moment, what goes first
    std::int64_t in_use = 0, most = 0;
    for (const auto& [time, bytes] : received_) most = std::max(most, in_use += bytes);
    add(0, MemoryUse::kInputs, most);
    std::sort(changes_.begin(), changes_.end(), [](const Change& a, const Change& b) { return a.time_ns < b.time_ns; });
    StageMemory memory;
    MemoryPoint now;
    for (std::size_t k = 0; k < changes_.size(); ++k) {
      const Change& change = changes_[k];
      now.time_ns = change.time_ns;
      (change.use == kPool ? now.pool : now.uses[change.use]) += change.bytes;
      if (k + 1 < changes_.size() && changes_[k + 1].time_ns == change.time_ns) continue;
      if (points) memory.points.push_back(now);
      memory.most_pool = std::max(memory.most_pool, now.pool);
      if (now.device() > memory.peak.device()) memory.peak = now;
    }
    if (memory.points.empty()) memory.points.push_back(now);
    return memory;
  }

 private:
  std::vector<Change> changes_;
  std::vector<std::pair<std::int64_t, std::int64_t>> received_;
};

/// A forward that is not the first of its chunk and micro-batch.
bool is_second_forward(Kind kind) { return kind != Kind::kForward && about(kind).work.forward > 0; }

/// When something goes to the pool and comes back, if it does.
struct Trip {
  bool moves = false;
  std::int64_t leaves_ns = 0;  ///< OFFLOAD: it has a place in the pool
  std::int64_t left_ns = 0;    ///< and none on the device
  std::int64_t comes_ns = 0;   ///< PREFETCH: it has a place on the device again
  std::int64_t back_ns = 0;    ///< and none in the pool
};

/// When the stash of a chunk and micro-batch ends.
struct Ends {
  std::int64_t again_ns = -1;    ///< end of a second forward
  std::int64_t backward_ns = 0;  ///< B, or I
  std::int64_t last_ns = 0;      ///< B, or W
};

/// The step of all stages, action by action.
class Walk {
 public:
  Walk(const Schedule& schedule, const MemoryModel& model, const std::vector<std::vector<ActionTime>>& times,
       const std::vector<std::vector<ActionTime>>& copies)
      : shape_(schedule.shape),
        model_(model),
        times_(times),
        split_(schedule),
        ends_(at(shape_.num_chunks() * shape_.micro_batches)),
        turning_heads_(turning_heads(shape_, schedule.ranks.at(at(shape_.stage_of(shape_.num_chunks() - 1))))),
        gradients_(at(shape_.num_chunks())),
        stages_(at(shape_.pp)) {
    for (auto& each : trips_) each.resize(ends_.size());
    for (const auto& list : times) {
      for (const ActionTime& time : list) {
        step_ns_ = std::max(step_ns_, time.end_ns);
        Ends& ends = ends_of(time.action);
        if (is_second_forward(time.action.kind)) ends.again_ns = time.end_ns;
        if (time.action == split_.input_gradient(time.action.chunk, time.action.micro_batch)) {
          ends.backward_ns = time.end_ns;
        }
        if (time.action == split_.last_backward(time.action.chunk, time.action.micro_batch)) ends.last_ns = time.end_ns;
      }
    }
    for (const auto& list : copies) {
      for (const ActionTime& time : list) {
        Trip& trip = trip_of(time.action);
        std::int64_t& end = is_offload(time.action.kind) ? trip.left_ns : trip.back_ns;
        end = std::max(end, time.end_ns);
      }
    }
    for (std::size_t stage = 0; stage < schedule.ranks.size(); ++stage) {
      place_copies(schedule.ranks[stage], times[stage]);
    }
  }

  std::vector<StageMemory> run(bool points) {
    for (int number = 0; number < shape_.pp; ++number) {
      Stage& stage = stages_[at(number)];
      for (int segment = 0; segment < shape_.segments; ++segment) {
        const int chunk = shape_.chunk_of(segment, number);
        stage.add(0, MemoryUse::kWeights, of(chunk).weights);
        stage.add(0, MemoryUse::kOptimizer, of(chunk).optimizer);
        if (model_.gradients_stay) stage.add(0, MemoryUse::kGradients, of(chunk).gradients);
      }
      for (const ActionTime& time : times_[at(number)]) compute(stage, time);
      if (!model_.update.empty()) {
        stage.hold(step_ns_, step_ns_ + 1, MemoryUse::kWorkspace, model_.update[at(number)]);
      }
    }
    const auto lands = [this](const Action& taker) { return trip_of(brought_by(taker)).moves; };
    for (const Message& message : message_times(shape_, times_, model_.receive_ahead, lands)) transfer(message);
    std::vector<StageMemory> curves;
    for (Stage& stage : stages_) curves.push_back(stage.finish(points));
    for (std::size_t stage = 0; stage < model_.host.size(); ++stage) curves[stage].host = model_.host[stage];
    return curves;
  }

 private:
  const ChunkBytes& of(int chunk) const { return model_.chunks[at(chunk)]; }
  /// What a chunk needs of a micro-batch, by where its head's backward runs.
  ChunkBytes of(const Action& action) const {
    ChunkBytes bytes = of(action.chunk);
    if (!turns(action)) return bytes;
    bytes.saved = model_.head->saved;
    bytes.forward = model_.head->forward;
    bytes.backward = model_.head->backward;
    return bytes;
  }
  bool turns(const Action& action) const {
    return model_.head && action.chunk + 1 == shape_.num_chunks() && turning_heads_[at(action.micro_batch)];
  }
  /// So many bytes of a chunk's gradients are there from now on.
  void have_gradients(Stage& stage, int chunk, std::int64_t now, std::int64_t bytes) {
    if (model_.gradients_stay || gradients_[at(chunk)] >= bytes) return;
    stage.add(now, MemoryUse::kGradients, bytes - gradients_[at(chunk)]);
    gradients_[at(chunk)] = bytes;
  }
  Ends& ends_of(const Action& action) { return ends_[at(action.chunk * shape_.micro_batches + action.micro_batch)]; }
  /// Of what `copy` moves: a stash, an input, a gradient.
  Trip& trip_of(const Action& copy) {
    const int neighbour = about(copy.kind).neighbour;
    const int number = copy.chunk * shape_.micro_batches + copy.micro_batch;
    return trips_.at(neighbour == 0 ? 0 : neighbour < 0 ? 1 : 2)[at(number)];
  }
  /// The PREFETCH that may bring what a forward or backward takes from its neighbour.
  static Action brought_by(const Action& taker) {
    const bool forward = taker.kind == Kind::kForward;
    return {taker.chunk, forward ? Kind::kPrefetchForward : Kind::kPrefetchBackward, taker.micro_batch};
  }

  /// When a stage's program comes to its copies, which it does as the Executor: see CopyLanes. Copies of which nothing
  /// is known are over at once.
  void place_copies(const std::vector<Action>& actions, const std::vector<ActionTime>& times) {
    std::size_t computed = 0;
    std::int64_t now = 0;
    std::deque<std::int64_t> stashes_leaving, borders_leaving;
    for (const Action& action : actions) {
      if (is_compute(action.kind)) now = times[computed++].end_ns;
      if (!is_copy(action.kind)) continue;
      Trip& trip = trip_of(action);
      trip.moves = true;
      if (is_offload(action.kind)) {
        auto& leaving = action.kind == Kind::kOffload ? stashes_leaving : borders_leaving;
        while (leaving.size() >= at(kOffloadsUnderWay)) {
          now = std::max(now, leaving.front());
          leaving.pop_front();
        }
        trip.leaves_ns = now;
        leaving.push_back(trip.left_ns = std::max(trip.left_ns, now));
      } else {
        trip.comes_ns = now = std::max(now, trip.left_ns);
        trip.back_ns = std::max(trip.back_ns, now);
      }
    }
  }

  /// What is on the device from one moment on and needed until another; between them it may be away.
  void keep(Stage& stage, const Trip& trip, std::int64_t from_ns, std::int64_t until_ns, MemoryUse use,
            std::int64_t bytes) {
    if (!trip.moves) return stage.hold(from_ns, until_ns, use, bytes);
    stage.hold(from_ns, std::max(from_ns, trip.left_ns), use, bytes);
    come_back(stage, trip, until_ns, use, bytes);
  }
  void come_back(Stage& stage, const Trip& trip, std::int64_t until_ns, MemoryUse use, std::int64_t bytes) {
    stage.lie_in_pool(trip.leaves_ns, trip.back_ns, bytes);
    stage.hold(trip.comes_ns, until_ns, use, bytes);
  }
  /// What a chunk was given is a part of its stash.
  void keep_input(Stage& stage, const Action& forward, std::int64_t from_ns, std::int64_t bytes) {
    const Trip& trip = trip_of({forward.chunk, Kind::kOffload, forward.micro_batch});
    keep(stage, trip, from_ns, ends_of(forward).last_ns, MemoryUse::kInputs, bytes);
  }

  void compute(Stage& stage, const ActionTime& time) {
    const Action& action = time.action;
    const ChunkBytes bytes = of(action);
    const auto works = [&](std::int64_t size) { stage.hold(time.start_ns, time.end_ns, MemoryUse::kWorkspace, size); };
    if (action.kind == Kind::kForward || is_second_forward(action.kind)) {
      const Ends& ends = ends_of(action);
      works(bytes.forward);
      if (action.kind != Kind::kForward) {
        stage.hold(time.end_ns, ends.last_ns, MemoryUse::kSaved, bytes.saved);
        return;
      }
      if (turns(action)) have_gradients(stage, action.chunk, time.start_ns, model_.head->gradients);
      const Trip& trip = trip_of({action.chunk, Kind::kOffload, action.micro_batch});
      const std::int64_t kept = ends.again_ns < 0 ? bytes.saved : bytes.kept;
      keep(stage, trip, time.end_ns, ends.last_ns, MemoryUse::kSaved, kept);
      hand_over(stage, action.chunk + 1, action.micro_batch, time.end_ns);
      return;
    }
    switch (action.kind) {
      case Kind::kBackward:
      case Kind::kBackwardInput:
      case Kind::kBackwardWeight:
        works(std::max<std::int64_t>(0, bytes.backward - bytes.saved));
        have_gradients(stage, action.chunk, time.start_ns, bytes.gradients);
        return;
      default:
        return;
    }
  }

  /// The next chunk's inputs, and later their gradients, where nobody sends them.
  void hand_over(Stage& stage, int next, int micro_batch, std::int64_t now) {
    if (next == shape_.num_chunks() || shape_.stage_of(next) != shape_.stage_of(next - 1)) return;
    const std::int64_t bytes = of(next).inputs;
    const Action forward{next, Kind::kForward, micro_batch};
    const Ends& its = ends_of(forward);
    const Ends& own = ends_of({next - 1, Kind::kForward, micro_batch});
    const Trip& input = trip_of(brought_by(forward));
    if (input.moves) {
      stage.hold(now, std::max(now, input.left_ns), MemoryUse::kInputs, bytes);
      stage.lie_in_pool(input.leaves_ns, input.back_ns, bytes);
    }
    keep_input(stage, forward, input.moves ? input.comes_ns : now, bytes);
    const Trip& gradient = trip_of({next - 1, Kind::kPrefetchBackward, micro_batch});
    keep(stage, gradient, its.backward_ns, own.backward_ns, MemoryUse::kMessages, bytes);
  }

  void transfer(const Message& message) {
    Stage& sender = stages_[at(message.from_stage)];
    Stage& receiver = stages_[at(message.to_stage)];
    const bool is_forward = message.to.kind == Kind::kForward;
    const std::int64_t bytes = of(is_forward ? message.to.chunk : message.from.chunk).inputs;
    const Ends& ends = ends_of(message.to);
    sender.hold(message.made_ns, message.there_ns, MemoryUse::kMessages, bytes);
    Trip lands = trip_of(brought_by(message.to));
    if (lands.moves) {
      lands.comes_ns = std::max(lands.comes_ns, message.there_ns);
      receiver.lie_in_pool(message.begins_ns, std::max(lands.back_ns, lands.comes_ns), bytes);
      if (is_forward) return keep_input(receiver, message.to, lands.comes_ns, bytes);
      return receiver.hold(lands.comes_ns, ends.backward_ns, MemoryUse::kMessages, bytes);
    }
    const Trip& stash = trip_of({message.to.chunk, Kind::kOffload, message.to.micro_batch});
    const bool moves = is_forward && stash.moves;
    receiver.receive(message.begins_ns, moves ? stash.left_ns : is_forward ? ends.last_ns : ends.backward_ns, bytes);
    if (moves) come_back(receiver, stash, ends.last_ns, MemoryUse::kInputs, bytes);
  }

  const Shape& shape_;
  const MemoryModel& model_;
  const std::vector<std::vector<ActionTime>>& times_;
  OptionalActions split_;
  std::vector<Ends> ends_;                  // chunk * micro_batches + micro_batch
  std::array<std::vector<Trip>, 3> trips_;  // [stash, input, gradient], as ends_
  std::vector<bool> turning_heads_;         // by micro-batch
  std::vector<std::int64_t> gradients_;     // there already, by chunk
  std::vector<Stage> stages_;
  std::int64_t step_ns_ = 0;
};

}  // namespace

std::int64_t MemoryPoint::device() const { return std::accumulate(uses.begin(), uses.end(), std::int64_t{0}); }

std::vector<StageMemory> memory_curves(const Schedule& schedule, const MemoryModel& model,
                                       const std::vector<std::vector<ActionTime>>& times,
                                       const std::vector<std::vector<ActionTime>>& copies, bool points) {
  model.check(schedule.shape);
  if (times.size() != schedule.ranks.size()) {
    throw std::invalid_argument("times of " + std::to_string(times.size()) + " stages for a schedule of " +
                                std::to_string(schedule.ranks.size()));
  }
  for (std::size_t stage = 0; stage < times.size(); ++stage) {
    std::size_t k = 0;
    for (const Action& action : schedule.ranks[stage]) {
      if (!is_compute(action.kind)) continue;
      if (k == times[stage].size() || times[stage][k].action != action) {
        throw std::invalid_argument("stage " + std::to_string(stage) + ": no time of " + to_string(action));
      }
      ++k;
    }
  }
  return Walk(schedule, model, times, copies).run(points);
}

}  // namespace fold3d::core
