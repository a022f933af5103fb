#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "comm/arbiter/own_process.h"
#include "comm/arbiter/shared_memory.h"
#include "core/network/hold_rule.h"

namespace fold3d::comm {

/// Where traffic waits for more urgent traffic on the same network card. TP.sync outranks pipeline messages (PP.sync),
/// which outrank slices of data-parallel traffic (DP.sync); among these, gathers yield to reduces, or reduces to
/// gathers where Options say so. How long is core::HoldRule's decision.
///
/// The ranks of one host share a card, so they share a arbiter: its state is in shared memory when it has a name.
/// Nobody ever owns that state: counts and times are atomics, and waits are futexes with a deadline. A rank that
/// died in the middle of a message leaves a count behind, which costs the others patience after each message and
/// blocks nobody. Thread-safe.
class NicArbiter {
 public:
  /// Of the card; the two do not disturb each other.
  enum class Direction : std::uint8_t { kSend, kReceive };
  /// DP.sync's two kinds, and TP.sync, which is announced and never held.
  enum class Traffic : std::uint8_t { kReduce, kGather, kTensor };

  /// As long as the rule says.
  static constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

  struct Options {
    core::HoldRule::Options rule = {};
    bool preempt = true;         ///< false: hold() never waits
    bool gathers_first = false;  ///< reduces yield to gathers; the same on all ranks of the host
  };

  /// What this object saw, not the other ranks of the host.
  struct Counters {
    std::int64_t preemptions = 0;    ///< holds of a slice that waited for a message or for TP.sync
    std::int64_t yields = 0;         ///< holds of the second kind of DP.sync that waited for the first only
    std::int64_t held_ns = 0;        ///< in all holds of slices together
    std::int64_t preempted_ns = 0;   ///< of these, in preemptions: sending time that slices lost
    std::int64_t delayed_ns = 0;     ///< that messages waited for slices which were under way when they began
    std::int64_t messages = 0;       ///< announced by message_begins(), both directions
    std::int64_t message_bytes = 0;  ///< of these
    std::int64_t message_holds = 0;  ///< messages that waited for TP.sync
    std::int64_t message_held_ns = 0;
  };

  /// A arbiter of this process alone.
  NicArbiter();
  /// `shared_name`: the same on all ranks of the host and on no other job; empty: this process alone. Throws
  /// CommError when the memory cannot be had or is another version's.
  explicit NicArbiter(const std::string& shared_name);
  NicArbiter(const std::string& shared_name, const Options& options);
  /// Takes back what this object announced and did not end; nothing in a forked child, whose parent goes on with it.
  ~NicArbiter();
  NicArbiter(const NicArbiter&) = delete;
  NicArbiter& operator=(const NicArbiter&) = delete;

  /// A message of `bytes` wants the card; of a receive: its frame is here, its payload is not. Never blocks.
  void message_begins(Direction direction, std::size_t bytes);
  /// It is through. One call for each message_begins().
  void message_ends(Direction direction);

  /// Of DP.sync's kinds the one to which the other yields.
  Traffic first() const { return first_; }
  /// A slice of it of `bytes` (0: not known) wants to be sent; it has been. As for messages.
  void slice_begins(std::size_t bytes = 0);
  void slice_ends();

  /// A slice of TP.sync of `bytes` wants the card; of a receive: its header is here, its payload is not. As for
  /// messages.
  void tensor_begins(Direction direction, std::size_t bytes);
  void tensor_ends(Direction direction);

  /// Blocks until a message may go: it yields to TP.sync. Returns the nanoseconds it was held.
  std::int64_t hold_message(Direction direction);
  /// Blocks until a slice of `traffic`, of DP.sync, may go, for at most `limit_ns`; returns the nanoseconds it was
  /// held. An atomic load for each kind of more urgent traffic when none is pending.
  std::int64_t hold(Direction direction, Traffic traffic, std::int64_t limit_ns = kUnlimited);
  /// About how long the largest transfer takes alone for which it waits now, in nanoseconds.
  std::int64_t longest_ns(Direction direction, Traffic traffic) const;
  /// The same as hold() for a slice that is sent and received in one, as a library's collectives are.
  std::int64_t hold_both_ways(Traffic traffic, std::int64_t limit_ns = kUnlimited);

  /// A slice was under way from `start_ns` to `end_ns`. Only counts what messages waited for it.
  void passed(Direction direction, std::int64_t start_ns, std::int64_t end_ns) noexcept;

  /// The speed of the card, for how long a message may take: measured by whoever sends slices, used by all ranks
  /// of the host. 0: not known, as at the beginning. Throws std::invalid_argument for a negative or infinite one.
  void set_bandwidth(double bytes_per_second);

  /// Ends hold() for ever and takes back what this object announced (its rank failed). Never blocks.
  void open() noexcept;

  /// Takes the name away when all ranks of the host have their arbiter; see SharedMemory::unlink().
  void unlink() noexcept;

  Counters counters() const;

 private:
  static constexpr std::size_t kNumKinds =
      5;  // of urgent traffic: messages sent and received, first slices, TP.sync each way

  /// One kind of urgent traffic, see core::HoldRule::Pipeline.
  struct Urgent {
    std::atomic<std::int64_t> newest_ns;
    std::atomic<std::int64_t> transfer_ns;
  };
  /// What the ranks share. All zeros is the state at rest.
  struct State {
    std::atomic<std::uint64_t> version;
    std::array<std::atomic<std::uint64_t>, 2> pending;  // a field of kFieldBits for each kind
    std::array<Urgent, kNumKinds> urgent;
    std::atomic<std::int64_t> bytes_per_second;
    std::atomic<std::uint32_t> sequence;  // the futex; moves whenever a kind falls silent
    std::atomic<std::int32_t> waiters;
  };

  /// What traffic waits for.
  struct Urgency {
    std::array<std::size_t, kNumKinds> kinds = {};  // the most urgent first
    std::size_t count = 0;
  };
  /// How a hold went.
  struct Held {
    std::int64_t ns = 0;
    bool for_urgent = false;  // for a kind that is not DP.sync
  };

  void begins(std::size_t kind, std::size_t bytes);
  void end_own(std::size_t kind);
  void ends(std::size_t kind, std::int64_t count) noexcept;
  void take_back() noexcept;
  void wake() noexcept;
  void wait(std::uint32_t sequence, std::int64_t until_ns);
  std::int64_t start_ns(std::int64_t ready_ns, std::size_t kind) const;
  int pending(std::size_t kind) const;
  Urgency urgency_of(Direction direction, Traffic traffic) const;
  Held hold_for(const Urgency& urgency, std::int64_t limit_ns);
  std::int64_t hold_slice(const Urgency& urgency, std::int64_t limit_ns);

  const OwnProcess process_;
  const core::HoldRule rule_;
  const bool preempt_;
  const Traffic first_;
  SharedMemory memory_;
  State& state_;
  std::array<std::atomic<std::int64_t>, kNumKinds> own_{};  // how much of `pending` is this object's
  std::atomic<bool> open_{false};

  std::atomic<std::int64_t> preemptions_{0}, yields_{0}, held_ns_{0}, preempted_ns_{0}, delayed_ns_{0}, messages_{0},
      message_bytes_{0}, message_holds_{0}, message_held_ns_{0};
};

/// "reduce", "gather" or "tensor".
inline const char* to_string(NicArbiter::Traffic traffic) {
  if (traffic == NicArbiter::Traffic::kTensor) return "tensor";
  return traffic == NicArbiter::Traffic::kReduce ? "reduce" : "gather";
}

}  // namespace fold3d::comm
