// ZB-V (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 6): two chunks on each stage, of which the second
// segment runs back (style v), and a split backward. A micro-batch's forward turns on the last stage and its loss is on
// stage 0, which therefore begins its backwards before the pipeline is full. Where F, I and W of a chunk take the same
// time, no stage ever waits between its first forward and its last W (m >= 2 pp - 1). No stage stashes more than 2 pp
// chunks, which is what pp stages of 1F1B weigh.
//
// Down is the chunk of segment 0 on a stage, up that of segment 1. The order of each stage has four parts:
//   fill      2 (pp - stage) - 1 forwards down, which is when the first micro-batch is back; then a forward up and one
//             down, in turn, `stage` times; then pp - stage times forward, I and W up
//   steady    forward, I and W down; forward, I and W up
//   drain     I down and I up, `stage` times, then the other Is down: each stage waits for those after it as little as
//   it
//             can, and keeps the Ws, which nobody waits for,
//   rest      for the time after.
// It is written for so many micro-batches that all parts are there. Where there are fewer, the actions of those that
// are missing are left out, after which nothing waits for more than before.
#include <algorithm>
#include <array>

#include "core/generators/registry.h"

namespace fold3d::core::generators {
namespace {

/// The list of one stage, as it grows.
class Stage {
 public:
  Stage(const Shape& shape, int stage) : shape_(shape), stage_(stage) {}

  void run(int segment, Kind kind) {
    const auto number = static_cast<std::size_t>(kind == Kind::kForward ? 0 : kind == Kind::kBackwardInput ? 1 : 2);
    const int micro_batch = next_[static_cast<std::size_t>(segment)][number]++;
    if (micro_batch < shape_.micro_batches) {
      actions_.push_back({shape_.chunk_of(segment, stage_), kind, micro_batch});
    }
  }
  void backward(int segment) {
    run(segment, Kind::kBackwardInput);
    run(segment, Kind::kBackwardWeight);
  }
  int forwards(int segment) const { return next_[static_cast<std::size_t>(segment)][0]; }
  int inputs(int segment) const { return next_[static_cast<std::size_t>(segment)][1]; }
  int weights(int segment) const { return next_[static_cast<std::size_t>(segment)][2]; }
  std::vector<Action> take() { return std::move(actions_); }

 private:
  Shape shape_;
  int stage_;
  std::array<std::array<int, 3>, 2> next_ = {};  // [segment][F, I, W]: micro-batch
  std::vector<Action> actions_;
};

std::vector<Action> actions_of(const Shape& shape, int stage) {
  constexpr int kDown = 0, kUp = 1;
  const int pp = shape.pp;
  const int m = std::max(shape.micro_batches, 2 * pp - 1);
  Stage list(shape, stage);
  for (int i = 0; i < 2 * (pp - stage) - 1; ++i) list.run(kDown, Kind::kForward);
  for (int i = 0; i < stage; ++i) {
    list.run(kUp, Kind::kForward);
    list.run(kDown, Kind::kForward);
  }
  for (int i = 0; i < pp - stage; ++i) {
    list.run(kUp, Kind::kForward);
    list.backward(kUp);
  }
  while (list.forwards(kUp) < m) {
    if (list.forwards(kDown) < m) list.run(kDown, Kind::kForward);
    list.backward(kDown);
    list.run(kUp, Kind::kForward);
    list.backward(kUp);
  }
  for (int i = 0; i < stage; ++i) {
    list.run(kDown, Kind::kBackwardInput);
    list.run(kUp, Kind::kBackwardInput);
  }
  while (list.inputs(kDown) < m) {
    list.run(kDown, Kind::kBackwardInput);
    list.run(kDown, Kind::kBackwardWeight);
  }
  while (list.weights(kUp) < m) list.run(kUp, Kind::kBackwardWeight);
  while (list.weights(kDown) < m) list.run(kDown, Kind::kBackwardWeight);
  return list.take();
}

Schedule generate(const Params& params) {
  Schedule schedule{params.shape, {}};
  for (int stage = 0; stage < params.shape.pp; ++stage) schedule.ranks.push_back(actions_of(params.shape, stage));
  return schedule;
}

}  // namespace

SchedulerInfo zb_v() {
  return {.name = "zb_v",
          .help =
              "two segments, the second back from the last stage, and a split backward: hardly a bubble, the memory "
              "of 1F1B's stage 0 (ZB-V)",
          .uses_segments = true,
          .segments = 2,
          .style = Style::kV,
          .generate = generate};
}

}  // namespace fold3d::core::generators
