#include "harness/comm_harness.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>

#include "comm/p2p/frame.h"
#include "comm/tcp/transport_tcp.h"
#include "core/generators/registry.h"
#include "core/passes/lower.h"
#include "harness/rank_threads.h"

namespace fold3d::test {
namespace {

constexpr std::uint8_t kInt64 = 4;  // as c10::ScalarType has it

std::uint64_t mix(std::uint64_t value) {  // splitmix64
  value += 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

std::uint64_t hash(std::initializer_list<std::uint64_t> values) {
  std::uint64_t result = 0;
  for (const std::uint64_t value : values) result = mix(result ^ mix(value));
  return result;
}

std::uint64_t key_of(const core::Action& action) {
  return hash({static_cast<std::uint64_t>(action.chunk), static_cast<std::uint64_t>(action.kind),
               static_cast<std::uint64_t>(action.micro_batch)});
}

core::Schedule compute_only(const std::string& name, int pp, int segments, int micro_batches, int group_size) {
  const core::Shape shape{.pp = pp, .segments = segments, .micro_batches = micro_batches};
  return core::generate(name, {.shape = shape, .group_size = group_size, .turn = ""});
}

}  // namespace

comm::Tensor make_tensor(const std::vector<std::int64_t>& values) {
  const std::size_t bytes = values.size() * sizeof(std::int64_t);
  auto buffer = std::make_shared<comm::HostBuffer>(bytes);
  if (bytes > 0) std::memcpy(buffer->host_data(), values.data(), bytes);
  return {.desc = {.dtype = kInt64,
                   .element_bytes = sizeof(std::int64_t),
                   .requires_grad = true,
                   .shape = {static_cast<std::int64_t>(values.size())}},
          .buffer = std::move(buffer)};
}

std::vector<std::int64_t> values_of(const comm::Tensor& tensor) {
  std::vector<std::int64_t> values(tensor.desc.bytes() / sizeof(std::int64_t));
  if (!values.empty()) std::memcpy(values.data(), tensor.buffer->host_data(), tensor.desc.bytes());
  return values;
}

comm::Options options_for(int pp, int stage, std::chrono::milliseconds timeout) {
  return {.shape = {.pp = pp, .segments = 1, .micro_batches = 1}, .stage = stage, .timeout = timeout};
}

std::vector<core::Action> program(const std::vector<std::string>& texts) {
  std::vector<core::Action> result;
  for (const std::string& text : texts) result.push_back(core::parse_action(text));
  return result;
}

std::vector<std::byte> frame_of(const std::string& send, std::uint32_t step, const comm::Tensors& tensors) {
  std::vector<std::byte> frame(comm::kFrameBytes);
  comm::write_frame(frame, core::parse_action(send), step, tensors);
  return frame;
}

TestRank::TestRank(std::unique_ptr<comm::Transport> transport, Settings settings)
    : settings_(std::move(settings)),
      random_(hash({settings_.seed, static_cast<std::uint64_t>(settings_.options.stage)})),
      communicator_(std::move(transport), settings_.options, settings_.arbiter) {}

comm::Tensors TestRank::contents(const core::Action& send, int step_index) const {
  const std::uint64_t origin = hash({settings_.seed, key_of(send), static_cast<std::uint64_t>(step_index)});
  static constexpr std::size_t kLengths[] = {0, 1, 20, 200, 240, 1000};
  comm::Tensors tensors;
  for (std::uint64_t i = 0; i < 1 + origin % 3; ++i) {
    std::vector<std::int64_t> values(kLengths[hash({origin, i}) % std::size(kLengths)]);
    for (std::size_t k = 0; k < values.size(); ++k) values[k] = static_cast<std::int64_t>(mix(origin + k));
    tensors.push_back(make_tensor(values));
  }
  return tensors;
}

void TestRank::check(const core::Action& recv, const comm::Tensors& tensors, int step_index) const {
  const comm::Tensors expected = contents(core::other_end(recv), step_index);
  bool equal = tensors.size() == expected.size();
  for (std::size_t i = 0; equal && i < tensors.size(); ++i) {
    equal = tensors[i].desc == expected[i].desc && values_of(tensors[i]) == values_of(expected[i]);
  }
  if (!equal) throw std::runtime_error("wrong content in " + core::to_string(recv));
}

void TestRank::compute(const core::Action& action) {
  if (settings_.max_compute_us == 0) return;
  random_ = mix(random_ + key_of(action));
  if (random_ % 4 != 0) return;
  std::this_thread::sleep_for(
      std::chrono::microseconds(random_ / 4 % static_cast<std::uint64_t>(settings_.max_compute_us + 1)));
}

void TestRank::step(const core::Schedule& schedule, int step_index) {
  const auto& program = schedule.ranks[static_cast<std::size_t>(settings_.options.stage)];
  const core::OptionalActions present(schedule);
  communicator_.begin(program);
  for (const core::Action& action : program) {
    if (core::is_recv(action.kind)) {
      communicator_.pass(action);
    } else if (core::is_send(action.kind)) {
      communicator_.send(action, contents(action, step_index));
    } else if (core::is_compute(action.kind)) {
      for (const core::Action& needed : core::waits_for(schedule.shape, action, true, present)) {
        if (core::is_recv(needed.kind)) check(needed, communicator_.wait(needed), step_index);
      }
      if (settings_.before) settings_.before(action);
      compute(action);
    } else if (settings_.before) {
      settings_.before(action);
    }
  }
  communicator_.finish();
}

Pipeline::Pipeline(RunSetup run)
    : run_(std::move(run)), loopback_([this] {
        comm::LoopbackOptions options = run_.loopback;
        options.pp = run_.schedules.front().shape.pp;
        return options;
      }()) {
  const int pp = run_.schedules.front().shape.pp;
  for (int s = 0; run_.over_tcp && s < pp; ++s) {
    links_.push_back(std::make_shared<comm::TcpPeers>(s, pp, "127.0.0.1", std::string(32, 'k')));
  }
}

std::unique_ptr<TestRank> Pipeline::rank(int stage, std::shared_ptr<comm::NicArbiter> arbiter,
                                         std::function<void(const core::Action&)> before) {
  TestRank::Settings settings{.options = run_.options,
                              .seed = run_.loopback.seed,
                              .max_compute_us = run_.max_compute_us,
                              .arbiter = std::move(arbiter),
                              .before = std::move(before)};
  settings.options.shape = run_.schedules.front().shape;
  settings.options.stage = stage;
  std::unique_ptr<comm::Transport> transport = loopback_.connect(stage);
  if (run_.over_tcp) {
    const int pp = settings.options.shape.pp;
    const auto at = [&](int s) { return links_[static_cast<std::size_t>((s + pp) % pp)]; };
    const bool both_ways = settings.options.shape.style == core::Style::kV;
    at(stage)->connect(at(stage + 1)->endpoint(), at(stage - 1)->endpoint(), run_.options.timeout, both_ways);
    transport = std::make_unique<comm::TcpTransport>(at(stage));
  }
  return std::make_unique<TestRank>(std::move(transport), std::move(settings));
}

std::vector<std::string> run_ranks(const RunSetup& run) {
  Pipeline pipeline(run);
  return run_on_threads(run.schedules.front().shape.pp, [&](int stage) {
    const auto rank = pipeline.rank(stage);
    for (int step = 0; step < run.steps; ++step) {
      rank->step(run.schedules[static_cast<std::size_t>(step) % run.schedules.size()], step);
    }
  });
}

core::Schedule lowered(const std::string& name, int pp, int segments, int micro_batches, int group_size) {
  return core::lower(compute_only(name, pp, segments, micro_batches, group_size), {.reduce = true});
}

core::Schedule lowered_evaluation(const std::string& name, int pp, int segments, int micro_batches) {
  core::Schedule schedule = compute_only(name, pp, segments, micro_batches, 0);
  for (auto& rank : schedule.ranks) {
    std::erase_if(rank, [](const core::Action& action) { return action.kind != core::Kind::kForward; });
  }
  return core::lower(schedule, {});
}

ScheduleCase random_case(std::mt19937_64& random, int least_pp, int most_pp) {
  const std::vector<core::SchedulerInfo> registry = core::registry();
  const core::SchedulerInfo& info = registry[random() % registry.size()];
  ScheduleCase c{.name = info.name, .pp = 0, .segments = 1, .micro_batches = 0, .group_size = 0};
  c.pp = least_pp + static_cast<int>(random() % static_cast<unsigned>(most_pp - least_pp + 1));
  c.micro_batches = 1 + static_cast<int>(random() % 8);
  if (info.uses_segments) c.segments = info.segments ? info.segments : 1 + static_cast<int>(random() % 3);
  if (info.uses_group_size) c.group_size = 1 + static_cast<int>(random() % static_cast<unsigned>(c.micro_batches));
  return c;
}

core::Schedule lowered(const ScheduleCase& c) {
  return lowered(c.name, c.pp, c.segments, c.micro_batches, c.group_size);
}

std::string to_string(const ScheduleCase& c) {
  return c.name + " pp=" + std::to_string(c.pp) + " segments=" + std::to_string(c.segments) +
         " m=" + std::to_string(c.micro_batches) + " N=" + std::to_string(c.group_size);
}

}  // namespace fold3d::test
