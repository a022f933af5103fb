#include "runtime/c10d/heartbeat.h"

#include <pthread.h>

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>

namespace fold3d::runtime {
namespace {

constexpr std::chrono::seconds kBegins{5}, kCloses{1};

}  // namespace

struct Heartbeat::State {
  const c10::intrusive_ptr<c10d::Store> shared;
  const std::string key;
  const std::chrono::milliseconds period;

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::string text;
  bool begun = false, said = false, closing = false, done = false;
};

Heartbeat::Heartbeat(c10::intrusive_ptr<c10d::Store> store, std::string key, std::chrono::milliseconds period,
                     std::string text)
    : state_(new State{.shared = std::move(store), .key = std::move(key), .period = period, .text = std::move(text)}),
      thread_([state = state_] { beat(*state); }) {
  pthread_setname_np(thread_.native_handle(), "heartbeat");
  std::unique_lock lock(state_->mutex);
  state_->changed.wait_for(lock, kBegins, [this] { return state_->begun; });
}

Heartbeat::~Heartbeat() { close(""); }

void Heartbeat::say(std::string text) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->text = std::move(text);
    state_->said = true;
  }
  state_->changed.notify_all();
}

void Heartbeat::close(std::string last) {
  if (!own_.is_here() || !thread_.joinable()) return;
  std::unique_lock lock(state_->mutex);
  if (!last.empty()) state_->text = std::move(last);
  state_->closing = true;
  state_->changed.notify_all();
  const bool done = state_->changed.wait_for(lock, kCloses, [this] { return state_->done; });
  lock.unlock();
  done ? thread_.join() : thread_.detach();
}

void Heartbeat::beat(State& state) noexcept {
  std::optional<c10::intrusive_ptr<c10d::Store>> own;  // the store's other users block it for as long as they wait
  std::uint64_t number = 0;
  std::unique_lock lock(state.mutex);
  for (;;) {
    const bool last = state.closing;
    const std::string line = std::to_string(++number) + " " + state.text;
    state.said = false;
    lock.unlock();
    try {
      if (!own) own = state.shared->clone();
      (*own)->set(state.key, line);
    } catch (const std::exception&) {
      // The store is late, or gone: the board, which reads, judges that.
    }
    lock.lock();
    state.begun = true;
    state.changed.notify_all();
    if (last) break;
    state.changed.wait_for(lock, state.period, [&] { return state.said || state.closing; });
  }
  state.done = true;
  lock.unlock();
  state.changed.notify_all();
}

}  // namespace fold3d::runtime
