#include "runtime/skip/rng_prefetch.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <optional>
#include <span>
#include <utility>

#include "core/random/mt19937.h"
#include "core/random/seed_chain.h"

namespace fold3d::runtime {
namespace {

constexpr int kFewest = 3;  // fewer are seeded faster one by one

/// What set_current_seed() does, from a state that is seeded already.
void set_state(at::Generator generator, const at::mt19937_data_pod& state) {
  thread_local at::mt19937 engine(0);  // to make one is to seed it
  engine.set_data(state);
  auto* const cpu = at::check_generator<at::CPUGeneratorImpl>(generator);
  cpu->set_engine(engine);
  cpu->set_next_float_normal_sample(std::nullopt);
  cpu->set_next_double_normal_sample(std::nullopt);
}

}  // namespace

void reseed(const std::vector<at::Generator>& generators, std::uint64_t seed) {
  for (at::Generator generator : generators) {
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

bool have_drawn(const std::vector<at::Generator>& generators) {
  return std::any_of(generators.begin(), generators.end(), [](const at::Generator& generator) {
    at::GeneratorImpl* const impl = generator.unsafeGetGeneratorImpl();
    const std::lock_guard lock(impl->mutex_);
    if (auto* const cpu = dynamic_cast<at::CPUGeneratorImpl*>(impl)) {
      const at::mt19937_data_pod state = cpu->engine().data();
      return state.left_ != 1 || state.next_ != 0;  // the first draw makes 624 numbers
    }
    return generator.device().is_cuda() && impl->get_offset() != 0;
  });
}

std::uint64_t draw_position(const std::vector<at::Generator>& generators) {
  std::uint64_t position = 0;
  for (const at::Generator& generator : generators) {
    at::GeneratorImpl* const impl = generator.unsafeGetGeneratorImpl();
    const std::lock_guard lock(impl->mutex_);
    if (auto* const cpu = dynamic_cast<at::CPUGeneratorImpl*>(impl)) {
      const at::mt19937_data_pod state = cpu->engine().data();  // a word is another one after 624 numbers
      position =
          core::next_seed(position ^ state.state_[0], static_cast<std::uint64_t>(state.left_) << 32 | state.next_);
    } else if (generator.device().is_cuda()) {
      position = core::next_seed(position, impl->get_offset());
    }
  }
  return position;
}

RngPrefetch::RngPrefetch(std::vector<std::uint64_t> constants, int end)
    : constants_(std::move(constants)), end_(std::min(end, static_cast<int>(constants_.size()))) {}

void RngPrefetch::reseed(const std::vector<at::Generator>& generators, std::uint64_t seed, int block) {
  if (!prepare(seed, block)) {
    runtime::reseed(generators, seed);
    return;
  }
  const at::mt19937_data_pod& state = states_[next_++];
  for (at::Generator generator : generators) {
    const std::lock_guard lock(generator.mutex());
    if (generator.device().is_cpu()) {
      set_state(generator, state);
    } else {
      generator.set_current_seed(seed);
    }
  }
}

/// Whether states_[next_] is that of `seed`.
bool RngPrefetch::prepare(std::uint64_t seed, int block) {
  if (next_ < states_.size()) {
    if (states_[next_].seed_ == seed) return true;
    // A module between the blocks moves the chain on, and will do so behind the next block, too.
    useful_ = false;
    states_.clear();
    next_ = 0;
  }
  const int count = std::min(end_ - block, static_cast<int>(core::kMt19937Lanes));
  if (!useful_ || count < kFewest) return false;
  states_.resize(static_cast<std::size_t>(count));
  next_ = 0;
  std::array<std::uint64_t, core::kMt19937Lanes> seeds{};
  std::array<std::uint32_t*, core::kMt19937Lanes> words{};
  for (std::size_t k = 0; k < states_.size(); ++k) {
    seeds[k] = k == 0 ? seed : core::next_seed(seeds[k - 1], constants_[static_cast<std::size_t>(block) + k]);
    states_[k].seed_ = seeds[k];
    states_[k].left_ = 1;
    states_[k].seeded_ = true;
    states_[k].next_ = 0;
    words[k] = states_[k].state_.data();
  }
  core::seed_mt19937(std::span(seeds).first(states_.size()), std::span(words).first(states_.size()));
  return true;
}

}  // namespace fold3d::runtime
