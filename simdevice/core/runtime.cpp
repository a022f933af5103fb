#include "simdevice/core/runtime.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace simdevice {

namespace {

thread_local std::uint64_t waits_of_thread = 0;

}  // namespace

Runtime::Runtime(int devices) : by_device_(static_cast<std::size_t>(devices)), memory_(*new Memory) {
  for (int device = 0; device < devices; ++device) new_stream_locked(device, 0);
}

Stream* Runtime::new_stream_locked(int device, int priority) {
  auto& siblings = by_device_.at(static_cast<std::size_t>(device));
  auto* stream =
      new Stream(static_cast<int>(streams_.size()), device, static_cast<std::int64_t>(siblings.size()), priority);
  streams_.push_back(stream);
  clocks_.emplace_back();
  siblings.push_back(stream);
  return stream;
}

Stream* Runtime::new_stream(int device, int priority) {
  const std::lock_guard lock(mutex_);
  return new_stream_locked(device, priority);
}

Stream* Runtime::stream(int device, std::int64_t id) {
  const std::lock_guard lock(mutex_);
  return by_device_.at(static_cast<std::size_t>(device)).at(static_cast<std::size_t>(id));
}

Stream* Runtime::stream_from_pool(int device, int priority) {
  const std::lock_guard lock(mutex_);
  auto& [next, pool] = pools_[{device, priority < 0}];
  if (pool.size() < kPoolStreams) {
    pool.push_back(new_stream_locked(device, priority));
    return pool.back();
  }
  return pool[static_cast<std::size_t>(next++ % kPoolStreams)];
}

std::vector<Stream*> Runtime::streams(int device) {
  const std::lock_guard lock(mutex_);
  return by_device_.at(static_cast<std::size_t>(device));
}

VectorClock& Runtime::clock_locked(const Stream* stream) {
  VectorClock& clock = clocks_[static_cast<std::size_t>(stream->number())];
  clock.join(host_);
  return clock;
}

std::string Runtime::launch_locked(Stream* stream, const std::string& what, const std::vector<Access>& accesses,
                                   std::unique_ptr<Task> task) {
  ++launches_;
  VectorClock& clock = clock_locked(stream);
  const std::uint64_t tick = clock.advance(static_cast<std::size_t>(stream->number()));
  std::string race;
  if (races_ != Races::kOff) {
    for (const Access& access : accesses) {
      access.block->history.forget(host_);
      std::string found = access.block->history.add({access.bytes, access.writes, stream->number(), tick, what}, clock,
                                                    access.block->begin());
      if (race.empty()) race = std::move(found);
    }
  }
  stream->push(std::move(task));
  return race;
}

void Runtime::launch(Stream* stream, const std::string& what, const std::vector<Access>& accesses,
                     std::unique_ptr<Task> task) {
  std::string race;
  {
    const std::lock_guard lock(mutex_);
    race = launch_locked(stream, what, accesses, std::move(task));
  }
  report(race);
}

void Runtime::use_on_host(const std::string& what, const Access& access) {
  std::string race;
  {
    const std::lock_guard lock(mutex_);
    if (races_ == Races::kOff) return;
    race = access.block->history.check({access.bytes, access.writes, kHost, 0, what}, host_, access.block->begin());
  }
  report(race);
}

void Runtime::report(const std::string& race) {
  if (race.empty()) return;
  bool raises = false;
  {
    const std::lock_guard lock(mutex_);
    reports_.push_back(race);
    raises = races_ == Races::kRaise;
  }
  if (raises) throw RaceError(race);
}

std::vector<std::string> Runtime::take_reports() {
  const std::lock_guard lock(mutex_);
  return std::exchange(reports_, {});
}

std::uint64_t Runtime::launches() {
  const std::lock_guard lock(mutex_);
  return launches_;
}

void Runtime::set_races(Races races) {
  const std::lock_guard lock(mutex_);
  races_ = races;
}

void Runtime::set_poison(bool poison) {
  const std::lock_guard lock(mutex_);
  poison_ = poison;
}

std::shared_ptr<Mark> Runtime::record(Stream* stream) {
  const std::lock_guard lock(mutex_);
  auto mark = std::make_shared<Mark>(clock_locked(stream));
  stream->push(make_task([mark] { mark->pass(); }));
  return mark;
}

void Runtime::wait(Stream* stream, const std::shared_ptr<Mark>& mark) {
  const std::lock_guard lock(mutex_);
  clock_locked(stream).join(mark->seen());
  if (!mark->is_passed()) stream->push(make_task([mark] { mark->wait(); }));
}

void Runtime::see(const VectorClock& seen) {
  const std::lock_guard lock(mutex_);
  host_.join(seen);
}

void Runtime::check_kernels() {
  std::vector<Stream*> all;
  {
    const std::lock_guard lock(mutex_);
    all = streams_;
  }
  for (Stream* stream : all) {
    if (const std::string error = stream->take_error(); !error.empty()) {
      throw KernelError("an earlier kernel on stream " + std::to_string(stream->number()) +
                        " of the simulated device failed: " + error);
    }
  }
}

std::uint64_t Runtime::waits() { return waits_of_thread; }

void Runtime::synchronize(const std::shared_ptr<Mark>& mark) {
  ++waits_of_thread;
  mark->wait();
  see(mark->seen());
  check_kernels();
}

void Runtime::synchronize(Stream* stream) {
  ++waits_of_thread;
  VectorClock seen;
  {
    const std::lock_guard lock(mutex_);
    seen = clock_locked(stream);
  }
  stream->wait_until_idle();
  see(seen);
  check_kernels();
}

void Runtime::synchronize(int device) {
  for (Stream* stream : streams(device)) synchronize(stream);
}

bool Runtime::query(const std::shared_ptr<Mark>& mark) {
  if (!mark->is_passed()) return false;
  see(mark->seen());
  return true;
}

bool Runtime::query(Stream* stream) {
  VectorClock seen;
  {
    const std::lock_guard lock(mutex_);
    seen = clock_locked(stream);
  }
  if (!stream->is_idle()) return false;
  see(seen);
  return true;
}

Block* Runtime::allocate(Stream* stream, std::size_t size) {
  std::string race;
  Block* block = nullptr;
  {
    const std::lock_guard lock(mutex_);
    block = memory_.allocate(stream == nullptr ? Block::kPinned : stream->device(), stream, size);
    if (poison_ && stream != nullptr) {
      auto fill = make_task([data = block->data, size] { std::memset(data, 0xFF, size); });
      race = launch_locked(stream, "allocate", {{block, dense(block->begin(), size), true}}, std::move(fill));
    }
  }
  try {
    report(race);
  } catch (const RaceError&) {
    free(block);
    throw;
  }
  return block;
}

void Runtime::free(Block* block) {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Mark>> marks;
  for (Stream* user : block->users) {
    marks.push_back(std::make_shared<Mark>(clock_locked(user)));
    user->push(make_task([mark = marks.back()] { mark->pass(); }));
  }
  memory_.free(block, std::move(marks));
}

void Runtime::record_use(Block* block, Stream* stream) {
  const std::lock_guard lock(mutex_);
  auto& users = block->users;
  if (stream != block->stream && std::find(users.begin(), users.end(), stream) == users.end()) users.push_back(stream);
}

Block* Runtime::find(const void* address) {
  const std::lock_guard lock(mutex_);
  return memory_.find(reinterpret_cast<std::uintptr_t>(address));
}

bool Runtime::is_pinned(const void* address) {
  const Block* const block = find(address);
  return block != nullptr && block->device == Block::kPinned;
}

void Runtime::release_memory() {
  for (int device = 0; device < devices(); ++device) synchronize(device);
  const std::lock_guard lock(mutex_);
  memory_.release();
}

MemoryStats Runtime::memory_stats(int device) {
  const std::lock_guard lock(mutex_);
  return memory_.stats(device);
}

void Runtime::reset_peak(int device) {
  const std::lock_guard lock(mutex_);
  memory_.reset_peak(device);
}

bool Runtime::drain(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::vector<Stream*> all;
  {
    const std::lock_guard lock(mutex_);
    all = streams_;
  }
  bool idle = true;
  for (Stream* stream : all) {
    const auto left = deadline - std::chrono::steady_clock::now();
    const auto rest = std::chrono::duration_cast<std::chrono::milliseconds>(left);
    idle &= stream->wait_until_idle(std::max(rest, std::chrono::milliseconds(0)));
  }
  return idle;
}

Runtime& runtime() {
  static Runtime* const one = [] {
    const char* devices = std::getenv("FOLD3D_SIM_DEVICES");
    return new Runtime(devices == nullptr ? 2 : std::max(1, std::atoi(devices)));
  }();
  return *one;
}

}  // namespace simdevice
