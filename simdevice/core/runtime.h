#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "simdevice/core/memory.h"
#include "simdevice/core/stream.h"

namespace simdevice {

/// Two accesses that nothing orders.
class RaceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A kernel failed after its launch.
class KernelError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// What is done about races.
enum class Races { kOff, kRaise, kRecord };

/// The devices of this process: streams, what orders them, memory. Launches go through it, so it sees every access
/// in an order that agrees with happens-before, and whether a race is found does not depend on timing. Thread-safe;
/// all threads of the host count as one, and what one has waited for all have.
class Runtime {
 public:
  explicit Runtime(int devices);
  ~Runtime() = delete;
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  int devices() const { return static_cast<int>(by_device_.size()); }

  /// Throws std::out_of_range.
  Stream* stream(int device, std::int64_t id);
  /// One of kPoolStreams streams of each priority, in turn, as CUDA does it. priority: below 0 is urgent; it has no
  /// effect.
  Stream* stream_from_pool(int device, int priority);
  Stream* new_stream(int device, int priority);

  /// Queues a kernel. what: its name in reports. Throws RaceError when it races with an earlier one; it is queued all
  /// the same.
  void launch(Stream* stream, const std::string& what, const std::vector<Access>& accesses, std::unique_ptr<Task> task);
  /// As launch(), for what the host does itself, now.
  void use_on_host(const std::string& what, const Access& access);

  std::shared_ptr<Mark> record(Stream* stream);
  /// Makes later work of the stream wait; returns at once.
  void wait(Stream* stream, const std::shared_ptr<Mark>& mark);
  /// Blocks the host. Throws KernelError for an earlier kernel of any stream that failed.
  void synchronize(const std::shared_ptr<Mark>& mark);
  void synchronize(Stream* stream);
  void synchronize(int device);
  bool query(const std::shared_ptr<Mark>& mark);
  bool query(Stream* stream);

  /// Memory on a stream of its device; null: pinned memory.
  Block* allocate(Stream* stream, std::size_t size);
  void free(Block* block);
  /// The block is not handed out again before the stream has passed what it has queued when the block is freed.
  void record_use(Block* block, Stream* stream);
  /// The block that `address` lies in, handed out or not; null: none.
  Block* find(const void* address);
  bool is_pinned(const void* address);
  void release_memory();
  MemoryStats memory_stats(int device);
  void reset_peak(int device);

  void set_races(Races races);
  /// Memory is overwritten on its stream whenever it is handed out.
  void set_poison(bool poison);
  std::vector<std::string> take_reports();
  std::uint64_t launches();
  /// How often the calling thread has waited for a device.
  static std::uint64_t waits();

  /// Waits until the streams are idle; false: some are not within `timeout`. For the end of the process.
  bool drain(std::chrono::milliseconds timeout);

  static constexpr int kPoolStreams = 32;

 private:
  Stream* new_stream_locked(int device, int priority);
  VectorClock& clock_locked(const Stream* stream);
  std::string launch_locked(Stream* stream, const std::string& what, const std::vector<Access>& accesses,
                            std::unique_ptr<Task> task);
  void report(const std::string& race);
  void check_kernels();
  void see(const VectorClock& seen);
  std::vector<Stream*> streams(int device);

  std::mutex mutex_;  // of all below; order of launches
  std::vector<Stream*> streams_;
  std::vector<std::vector<Stream*>> by_device_;
  std::map<std::pair<int, bool>, std::pair<int, std::vector<Stream*>>> pools_;  // device, urgent: next, streams
  std::vector<VectorClock> clocks_;
  VectorClock host_;  // what the host has waited for
  Memory& memory_;
  Races races_ = Races::kRaise;
  bool poison_ = false;
  std::vector<std::string> reports_;
  std::uint64_t launches_ = 0;
};

/// The process's own, with as many devices as FOLD3D_SIM_DEVICES says, else 2.
Runtime& runtime();

}  // namespace simdevice
