#include "loopback/transport_loopback.h"

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

#include "comm/base/errors.h"
#include "comm/base/host_buffer.h"

namespace fold3d::comm {
namespace {

/// Life of one rank, seen by all.
struct Rank {
  std::atomic<bool> closed{false};
  std::atomic<bool> stopped{false};         // by a Fault
  std::array<std::atomic<int>, 2> calls{};  // by Fault::Call
  std::mutex mutex;
  std::condition_variable changed;  // closed
  std::string reason;               // of closed; never changes after it
};

/// One direction of one connection: a sender offers bytes, a receiver takes them.
struct Link {
  enum class State { kEmpty, kOffered, kTaken, kRefused };
  std::mutex mutex;
  std::condition_variable changed;
  State state = State::kEmpty;
  std::span<const std::byte> offer;
};

}  // namespace

struct Loopback::Hub {
  explicit Hub(LoopbackOptions o)
      : options(std::move(o)),
        ranks(static_cast<std::size_t>(options.pp)),
        links(static_cast<std::size_t>(options.pp * options.pp * 2)) {}

  Rank& rank(int stage) { return ranks[static_cast<std::size_t>(stage)]; }
  Link& link(int from, int to, Channel channel) {
    const int pair = from * options.pp + to;
    return links[static_cast<std::size_t>(2 * pair + static_cast<int>(channel))];
  }

  const LoopbackOptions options;
  std::vector<Rank> ranks;
  std::vector<Link> links;
};

namespace {

class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(std::shared_ptr<Loopback::Hub> hub, int stage)
      : hub_(std::move(hub)), stage_(stage), self_(hub_->rank(stage)) {
    const auto rank = static_cast<std::uint64_t>(stage);
    for (std::size_t i = 0; i < random_.size(); ++i) {
      random_[i].seed(hub_->options.seed * 1'000'003 + rank * random_.size() + i);
    }
  }

  ~LoopbackTransport() override { abort("the rank left"); }

  void send(Channel channel, int peer, std::shared_ptr<Buffer> buffer) override {
    offer(channel, peer, {buffer->host_data(), buffer->bytes()});
  }

  void recv(Channel channel, int peer, std::shared_ptr<Buffer> buffer) override {
    take(channel, peer, {buffer->host_data(), buffer->bytes()});
  }

  void send_frame(Channel channel, int peer, std::span<const std::byte> frame) override { offer(channel, peer, frame); }

  void recv_frame(Channel channel, int peer, std::span<std::byte> frame) override { take(channel, peer, frame); }

  void abort(const std::string& reason) override {
    {
      const std::lock_guard lock(self_.mutex);
      if (self_.closed.load()) return;
      self_.reason = reason;
      self_.closed.store(true);
    }
    self_.changed.notify_all();
    for (int peer = 0; peer < hub_->options.pp; ++peer) {
      for (const Channel channel : {Channel::kForward, Channel::kBackward}) {
        wake(hub_->link(stage_, peer, channel));
        wake(hub_->link(peer, stage_, channel));
      }
    }
  }

 private:
  template <class Shared>
  static void wake(Shared& shared) {
    {
      const std::lock_guard lock(shared.mutex);
    }  // whoever checked `closed` before is waiting now
    shared.changed.notify_all();
  }

  static std::string reason_of(Rank& rank) {
    const std::lock_guard lock(rank.mutex);
    return rank.reason;
  }

  void check_closed(int stage) {
    if (self_.closed.load()) throw AbortedError(reason_of(self_));
    Rank& peer = hub_->rank(stage);
    if (!peer.closed.load()) return;
    throw CommError("stage " + std::to_string(stage) + " closed the connection: " + reason_of(peer));
  }

  /// Start of every call: random delay, planned failures.
  void enter(Fault::Call call, std::size_t lane) {
    const int count = self_.calls[static_cast<std::size_t>(call)].fetch_add(1);
    for (const Fault& fault : hub_->options.faults) {
      if (fault.stage != stage_ || fault.call != call || fault.after != count) continue;
      if (fault.mode == Fault::Mode::kThrow) throw std::runtime_error("injected failure");
      self_.stopped.store(true);
    }
    const auto longest = hub_->options.max_delay.count();
    if (longest > 0 && random_[lane]() % 4 == 0) {
      const std::chrono::microseconds delay(random_[lane]() % static_cast<std::uint64_t>(longest + 1));
      std::unique_lock lock(self_.mutex);
      self_.changed.wait_for(lock, delay, [&] { return self_.closed.load(); });
    }
    leave();
  }

  /// A stopped rank gets no further.
  void leave() {
    if (!self_.stopped.load()) return;
    std::unique_lock lock(self_.mutex);
    self_.changed.wait(lock, [&] { return self_.closed.load(); });
    throw AbortedError(self_.reason);
  }

  void offer(Channel channel, int peer, std::span<const std::byte> bytes) {
    enter(Fault::Call::kSend, static_cast<std::size_t>(channel));
    Link& link = hub_->link(stage_, peer, channel);
    std::unique_lock lock(link.mutex);
    check_closed(peer);
    link.offer = bytes;
    link.state = Link::State::kOffered;
    link.changed.notify_all();
    link.changed.wait(lock, [&] { return link.state != Link::State::kOffered || is_broken(peer); });
    const Link::State outcome = std::exchange(link.state, Link::State::kEmpty);
    if (outcome == Link::State::kRefused) throw ProtocolError("the receiver expects another size");
    if (outcome == Link::State::kOffered) check_closed(peer);
    lock.unlock();
    leave();
  }

  void take(Channel channel, int peer, std::span<std::byte> bytes) {
    enter(Fault::Call::kRecv, 2 + static_cast<std::size_t>(channel));
    Link& link = hub_->link(peer, stage_, channel);
    std::unique_lock lock(link.mutex);
    link.changed.wait(lock, [&] { return link.state == Link::State::kOffered || is_broken(peer); });
    if (link.state != Link::State::kOffered) check_closed(peer);
    const bool fits = link.offer.size() == bytes.size();
    if (fits) std::memcpy(bytes.data(), link.offer.data(), bytes.size());
    link.state = fits ? Link::State::kTaken : Link::State::kRefused;
    link.changed.notify_all();
    if (!fits) {
      throw ProtocolError("a receive of " + std::to_string(bytes.size()) + " bytes met a message of " +
                          std::to_string(link.offer.size()) + " bytes");
    }
    lock.unlock();
    leave();
  }

  bool is_broken(int peer) { return self_.closed.load() || hub_->rank(peer).closed.load(); }

  const std::shared_ptr<Loopback::Hub> hub_;
  const int stage_;
  Rank& self_;
  std::array<std::mt19937_64, 4> random_;  // one for each lane: every lane calls from its own thread
};

}  // namespace

Loopback::Loopback(LoopbackOptions options) {
  if (options.pp < 1) throw std::invalid_argument("loopback: pp must be at least 1");
  hub_ = std::make_shared<Hub>(std::move(options));
}

Loopback::~Loopback() = default;

std::unique_ptr<Transport> Loopback::connect(int stage) {
  if (stage < 0 || stage >= hub_->options.pp) {
    throw std::invalid_argument("loopback: there is no stage " + std::to_string(stage));
  }
  return std::make_unique<LoopbackTransport>(hub_, stage);
}

}  // namespace fold3d::comm
