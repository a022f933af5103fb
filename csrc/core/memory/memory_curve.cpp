#include "core/memory/memory_curve.h"

#include <algorithm>
#include <deque>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "core/ir/action_kinds.h"
#include "core/ir/deps.h"
#include "core/ir/stash.h"

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

  StageMemory finish() {
    std::sort(received_.begin(), received_.end());  // at one moment, what goes first
    std::int64_t in_use = 0, most = 0;
    for (const auto& [time, bytes] : received_) most = std::max(most, in_use += bytes);
    add(0, MemoryUse::kInputs, most);
    std::stable_sort(changes_.begin(), changes_.end(), [](const Change& a, const Change& b) {
      return std::tuple(a.time_ns, a.bytes > 0) < std::tuple(b.time_ns, b.bytes > 0);
    });
    StageMemory memory;
    MemoryPoint now;
    for (std::size_t k = 0; k < changes_.size(); ++k) {
      const Change& change = changes_[k];
      now.time_ns = change.time_ns;
      (change.use == kPool ? now.pool : now.uses[change.use]) += change.bytes;
      if (k + 1 < changes_.size() && changes_[k + 1].time_ns == change.time_ns) continue;
      memory.points.push_back(now);
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

/// When the stash of a chunk and micro-batch ends, and where it lies until then.
struct Ends {
  std::int64_t again_ns = -1;    ///< end of a second forward
  std::int64_t backward_ns = 0;  ///< B, or I
  std::int64_t last_ns = 0;      ///< B, or W
  bool moves = false;            ///< to the pool, and back
  std::int64_t leaves_ns = 0;    ///< OFFLOAD: it has a place in the pool
  std::int64_t left_ns = 0;      ///< and none on the device
  std::int64_t comes_ns = 0;     ///< PREFETCH: it has a place on the device again
  std::int64_t back_ns = 0;      ///< and none in the pool
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
        has_gradients_(at(shape_.num_chunks()), model.gradients_stay),
        stages_(at(shape_.pp)) {
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
        Ends& ends = ends_of(time.action);
        std::int64_t& end = time.action.kind == Kind::kOffload ? ends.left_ns : ends.back_ns;
        end = std::max(end, time.end_ns);
      }
    }
    for (std::size_t stage = 0; stage < schedule.ranks.size(); ++stage) {
      place_copies(schedule.ranks[stage], times[stage]);
    }
  }

  std::vector<StageMemory> run() {
    for (int number = 0; number < shape_.pp; ++number) {
      Stage& stage = stages_[at(number)];
      for (int chunk = number; chunk < shape_.num_chunks(); chunk += shape_.pp) {
        stage.add(0, MemoryUse::kWeights, of(chunk).weights);
        stage.add(0, MemoryUse::kOptimizer, of(chunk).optimizer);
        if (model_.gradients_stay) stage.add(0, MemoryUse::kGradients, of(chunk).gradients);
      }
      if (!model_.fixed.empty()) stage.add(0, MemoryUse::kWorkspace, model_.fixed[at(number)]);
      for (const ActionTime& time : times_[at(number)]) compute(stage, time);
      if (!model_.update.empty()) {
        stage.hold(step_ns_, step_ns_ + 1, MemoryUse::kWorkspace, model_.update[at(number)]);
      }
    }
    for (const Message& message : message_times(shape_, times_, model_.receive_ahead)) transfer(message);
    std::vector<StageMemory> curves;
    for (Stage& stage : stages_) curves.push_back(stage.finish());
    return curves;
  }

 private:
  const ChunkBytes& of(int chunk) const { return model_.chunks[at(chunk)]; }
  Ends& ends_of(const Action& action) { return ends_[at(action.chunk * shape_.micro_batches + action.micro_batch)]; }

  /// When a stage's program comes to its copies, which it does as the Executor: see CopyLanes. Copies of which nothing
  /// is known are over at once.
  void place_copies(const std::vector<Action>& actions, const std::vector<ActionTime>& times) {
    std::size_t computed = 0;
    std::int64_t now = 0;
    std::deque<std::int64_t> leaving;
    for (const Action& action : actions) {
      if (is_compute(action.kind)) now = times[computed++].end_ns;
      if (action.kind != Kind::kOffload && action.kind != Kind::kPrefetch) continue;
      Ends& ends = ends_of(action);
      ends.moves = true;
      if (action.kind == Kind::kOffload) {
        while (leaving.size() >= at(kOffloadsUnderWay)) {
          now = std::max(now, leaving.front());
          leaving.pop_front();
        }
        ends.leaves_ns = now;
        leaving.push_back(ends.left_ns = std::max(ends.left_ns, now));
      } else {
        ends.comes_ns = now = std::max(now, ends.left_ns);
        ends.back_ns = std::max(ends.back_ns, now);
      }
    }
  }

  /// What a forward keeps until its last backward.
  void keep(Stage& stage, const Ends& ends, std::int64_t from_ns, MemoryUse use, std::int64_t bytes) {
    if (!ends.moves) return stage.hold(from_ns, ends.last_ns, use, bytes);
    stage.hold(from_ns, std::max(from_ns, ends.left_ns), use, bytes);
    come_back(stage, ends, use, bytes);
  }
  void come_back(Stage& stage, const Ends& ends, MemoryUse use, std::int64_t bytes) {
    stage.lie_in_pool(ends.leaves_ns, ends.back_ns, bytes);
    stage.hold(ends.comes_ns, ends.last_ns, use, bytes);
  }

  void compute(Stage& stage, const ActionTime& time) {
    const Action& action = time.action;
    const ChunkBytes& bytes = of(action.chunk);
    const auto works = [&](std::int64_t size) { stage.hold(time.start_ns, time.end_ns, MemoryUse::kWorkspace, size); };
    if (action.kind == Kind::kForward || is_second_forward(action.kind)) {
      const Ends& ends = ends_of(action);
      works(bytes.forward);
      if (action.kind != Kind::kForward) {
        stage.hold(time.end_ns, ends.last_ns, MemoryUse::kSaved, bytes.saved);
        return;
      }
      keep(stage, ends, time.end_ns, MemoryUse::kSaved, ends.again_ns < 0 ? bytes.saved : bytes.kept);
      hand_over(stage, action.chunk + 1, action.micro_batch, time.end_ns);
      return;
    }
    switch (action.kind) {
      case Kind::kBackward:
      case Kind::kBackwardInput:
      case Kind::kBackwardWeight:
        works(std::max<std::int64_t>(0, bytes.backward - bytes.saved));
        if (!has_gradients_[at(action.chunk)]) {
          stage.add(time.start_ns, MemoryUse::kGradients, bytes.gradients);
          has_gradients_[at(action.chunk)] = true;
        }
        return;
      default:
        return;
    }
  }

  /// The next chunk's inputs, and later their gradients, where nobody sends them.
  void hand_over(Stage& stage, int next, int micro_batch, std::int64_t now) {
    if (next == shape_.num_chunks() || shape_.stage_of(next) != shape_.stage_of(next - 1)) return;
    const std::int64_t bytes = of(next).inputs;
    const Ends& its = ends_of({next, Kind::kForward, micro_batch});
    const Ends& own = ends_of({next - 1, Kind::kForward, micro_batch});
    keep(stage, its, now, MemoryUse::kInputs, bytes);
    stage.hold(its.backward_ns, own.backward_ns, MemoryUse::kMessages, bytes);
  }

  void transfer(const Message& message) {
    Stage& sender = stages_[at(message.from_stage)];
    Stage& receiver = stages_[at(message.to_stage)];
    const bool is_forward = message.to.kind == Kind::kForward;
    const std::int64_t bytes = of(is_forward ? message.to.chunk : message.from.chunk).inputs;
    const Ends& ends = ends_of(message.to);
    sender.hold(message.made_ns, message.there_ns, MemoryUse::kMessages, bytes);
    const bool moves = is_forward && ends.moves;
    receiver.receive(message.begins_ns, moves ? ends.left_ns : is_forward ? ends.last_ns : ends.backward_ns, bytes);
    if (moves) come_back(receiver, ends, MemoryUse::kInputs, bytes);
  }

  const Shape& shape_;
  const MemoryModel& model_;
  const std::vector<std::vector<ActionTime>>& times_;
  OptionalActions split_;
  std::vector<Ends> ends_;           // chunk * micro_batches + micro_batch
  std::vector<bool> has_gradients_;  // by chunk
  std::vector<Stage> stages_;
  std::int64_t step_ns_ = 0;
};

}  // namespace

std::int64_t MemoryPoint::device() const { return std::accumulate(uses.begin(), uses.end(), std::int64_t{0}); }

std::vector<StageMemory> memory_curves(const Schedule& schedule, const MemoryModel& model,
                                       const std::vector<std::vector<ActionTime>>& times,
                                       const std::vector<std::vector<ActionTime>>& copies) {
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
  return Walk(schedule, model, times, copies).run();
}

}  // namespace fold3d::core
