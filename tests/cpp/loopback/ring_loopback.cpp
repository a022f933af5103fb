#include "loopback/ring_loopback.h"

#include <array>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

#include "comm/base/errors.h"

namespace fold3d::comm {

/// Bytes from one member to the next.
class RingLoopback::Pipe {
 public:
  explicit Pipe(std::size_t capacity) : ring_(capacity) {}

  /// False when the pipe was closed.
  bool write(std::span<const std::byte> bytes) {
    std::unique_lock lock(mutex_);
    while (!bytes.empty()) {
      changed_.wait(lock, [&] { return closed_ || used_ < ring_.size(); });
      if (closed_) return false;
      for (; !bytes.empty() && used_ < ring_.size(); bytes = bytes.subspan(1)) {
        ring_[(begin_ + used_++) % ring_.size()] = bytes.front();
      }
      changed_.notify_all();
    }
    return true;
  }

  /// False when the pipe was closed and is empty.
  bool read(std::span<std::byte> bytes) {
    std::unique_lock lock(mutex_);
    while (!bytes.empty()) {
      changed_.wait(lock, [&] { return closed_ || used_ > 0; });
      if (used_ == 0) return false;
      for (; !bytes.empty() && used_ > 0; bytes = bytes.subspan(1), --used_) {
        bytes.front() = ring_[begin_];
        begin_ = (begin_ + 1) % ring_.size();
      }
      changed_.notify_all();
    }
    return true;
  }

  void close() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::byte> ring_;
  std::size_t begin_ = 0;
  std::size_t used_ = 0;
  bool closed_ = false;
};

class RingLoopback::Link final : public RingConnection {
 public:
  Link(const RingLoopbackOptions& options, int rank, NicArbiter::Traffic traffic, std::shared_ptr<Pipe> out,
       std::shared_ptr<Pipe> in)
      : options_(options), rank_(rank), traffic_(traffic), out_(std::move(out)), in_(std::move(in)) {
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      lanes_[i].random.seed(options.seed * 1'000'003 + static_cast<std::uint64_t>(rank) * 4 +
                            static_cast<std::uint64_t>(traffic) * 2 + i);
    }
  }

  ~Link() override { abort("the member left"); }

  void send(std::span<const std::byte> header, std::span<const std::byte> payload) override {
    enter(RingFault::Call::kSend);
    if (!out_->write(header) || !out_->write(payload)) lost((rank_ + 1) % options_.size);
    pause();
  }

  void recv(std::span<std::byte> bytes) override {
    enter(RingFault::Call::kRecv);
    if (!in_->read(bytes)) lost((rank_ + options_.size - 1) % options_.size);
    pause();
  }

  bool can_split() const override { return true; }

  void abort(const std::string& reason) noexcept override {
    {
      const std::lock_guard lock(mutex_);
      if (aborted_) return;
      aborted_ = true;
      reason_ = reason;
    }
    changed_.notify_all();
    out_->close();
    in_->close();
  }

 private:
  struct LaneState {
    std::mt19937_64 random;
    int calls = 0;
  };

  [[noreturn]] void lost(int peer) {
    const std::lock_guard lock(mutex_);
    if (aborted_) throw AbortedError(reason_);
    throw CommError("lost the connection to replica " + std::to_string(peer) + ": closed by the peer");
  }

  /// Start of every call: planned failures, random delay.
  void enter(RingFault::Call call) {
    LaneState& lane = lanes_[static_cast<std::size_t>(call)];
    const int count = lane.calls++;
    for (const RingFault& fault : options_.faults) {
      if (fault.rank != rank_ || fault.traffic != traffic_ || fault.call != call || fault.after != count) continue;
      if (fault.mode == RingFault::Mode::kThrow) throw std::runtime_error("injected failure");
      stopped_.store(true);
    }
    const auto longest = options_.max_delay.count();
    if (longest > 0 && lane.random() % 4 == 0) {
      const std::chrono::microseconds delay(lane.random() % static_cast<std::uint64_t>(longest + 1));
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, delay, [&] { return aborted_; });
    }
    pause();
  }

  /// A stopped member gets no further.
  void pause() {
    if (!stopped_.load()) return;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return aborted_; });
    throw AbortedError(reason_);
  }

  const RingLoopbackOptions options_;
  const int rank_;
  const NicArbiter::Traffic traffic_;
  const std::shared_ptr<Pipe> out_, in_;
  std::array<LaneState, 2> lanes_;  // by call: each comes from one thread
  std::atomic<bool> stopped_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool aborted_ = false;
  std::string reason_;
};

RingLoopback::RingLoopback(RingLoopbackOptions options) : options_(std::move(options)) {
  if (options_.size < 2 || options_.capacity < 1)
    throw std::invalid_argument("ring loopback: size 2, capacity 1 at least");
  for (int i = 0; i < 2 * options_.size; ++i) pipes_.push_back(std::make_shared<Pipe>(options_.capacity));
}

RingLoopback::~RingLoopback() = default;

std::shared_ptr<RingConnection> RingLoopback::connection(int rank, NicArbiter::Traffic traffic) {
  const auto pipe_from = [&](int member) {
    return pipes_[static_cast<std::size_t>(static_cast<int>(traffic) * options_.size +
                                           (member + options_.size) % options_.size)];
  };
  return std::make_shared<Link>(options_, rank, traffic, pipe_from(rank), pipe_from(rank - 1));
}

}  // namespace fold3d::comm
