#include "comm_harness.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>

#include "comm/frame.h"
#include "comm/tcp_links.h"
#include "comm/transport_tcp.h"
#include "core/generators/registry.h"
#include "core/lower.h"

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
      communicator_(std::move(transport), settings_.options) {}

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
  const core::SplitBackward split(schedule);
  communicator_.begin(program);
  for (const core::Action& action : program) {
    if (core::is_recv(action.kind)) {
      communicator_.pass(action);
    } else if (core::is_send(action.kind)) {
      communicator_.send(action, contents(action, step_index));
    } else if (core::is_compute(action.kind)) {
      for (const core::Action& needed : core::waits_for(schedule.shape, action, true, split)) {
        if (core::is_recv(needed.kind)) check(needed, communicator_.wait(needed), step_index);
      }
      compute(action);
    }
  }
  communicator_.finish();
}

std::vector<std::string> run_ranks(const RunSetup& run) {
  const int pp = run.schedules.front().shape.pp;
  comm::LoopbackOptions loopback_options = run.loopback;
  loopback_options.pp = pp;
  comm::Loopback loopback(loopback_options);
  std::vector<std::shared_ptr<comm::TcpLinks>> links;  // [stage]
  for (int s = 0; run.over_tcp && s < pp; ++s) {
    links.push_back(std::make_shared<comm::TcpLinks>(s, pp, "127.0.0.1", std::string(32, 'k')));
  }
  std::vector<std::string> errors(static_cast<std::size_t>(pp));
  std::vector<std::thread> threads;
  for (int s = 0; s < pp; ++s) {
    threads.emplace_back([&, s] {
      TestRank::Settings settings{
          .options = run.options, .seed = loopback_options.seed, .max_compute_us = run.max_compute_us};
      settings.options.shape = run.schedules.front().shape;
      settings.options.stage = s;
      try {
        std::unique_ptr<comm::Transport> transport = loopback.connect(s);
        if (run.over_tcp) {
          const auto at = [&](int stage) { return links[static_cast<std::size_t>((stage + pp) % pp)]; };
          at(s)->connect(at(s + 1)->endpoint(), at(s - 1)->endpoint(), run.options.timeout);
          transport = std::make_unique<comm::TcpTransport>(at(s), std::move(transport));
        }
        TestRank rank(std::move(transport), settings);
        for (int step = 0; step < run.steps; ++step) {
          rank.step(run.schedules[static_cast<std::size_t>(step) % run.schedules.size()], step);
        }
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(s)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

core::Schedule lowered(const std::string& name, int pp, int segments, int micro_batches, int group_size) {
  return core::lower(compute_only(name, pp, segments, micro_batches, group_size), true);
}

core::Schedule lowered_evaluation(const std::string& name, int pp, int segments, int micro_batches) {
  core::Schedule schedule = compute_only(name, pp, segments, micro_batches, 0);
  for (auto& rank : schedule.ranks) {
    std::erase_if(rank, [](const core::Action& action) { return action.kind != core::Kind::kForward; });
  }
  return core::lower(schedule, false);
}

}  // namespace fold3d::test
