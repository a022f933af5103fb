#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "core/ir/schedule.h"
#include "core/memory/memory_model.h"
#include "core/memory/message_times.h"

namespace fold3d::core {

/// What bytes on the device are for.
enum class MemoryUse : std::uint8_t {
  kWeights,
  kGradients,
  kOptimizer,
  kInputs,    ///< of chunks, from another stage: until their backward
  kSaved,     ///< what forwards keep for their backwards
  kMessages,  ///< to another stage, and from it until they are used
  kWorkspace  ///< of the action under way
};
inline constexpr std::array<std::string_view, 7> kMemoryUseNames = {"weights", "gradients", "optimizer", "inputs",
                                                                    "saved",   "messages",  "workspace"};
inline constexpr std::size_t kNumMemoryUses = kMemoryUseNames.size();
using MemoryUses = std::array<std::int64_t, kNumMemoryUses>;  ///< bytes by MemoryUse

/// From `time_ns` on a stage has so many bytes.
struct MemoryPoint {
  std::int64_t time_ns = 0;
  MemoryUses uses = {};
  std::int64_t pool = 0;  ///< bytes in the host's pool, not on the device

  std::int64_t device() const;
};

/// A stage's step.
struct StageMemory {
  std::vector<MemoryPoint> points;  ///< by time; never empty
  MemoryPoint peak;                 ///< the first with most bytes on the device
  std::int64_t most_pool = 0;
  std::int64_t host = 0;  ///< in host memory all the time, beside the pool
};

/// The bytes of every stage in a step of which it is known when each compute action ran.
///
/// F keeps its inputs and what the graph saves until the last part of its backward. Where the same chunk and
/// micro-batch is computed again, F keeps its inputs and ChunkBytes::kept, and its second forward brings the rest.
/// Outputs stay until they are sent, gradients of inputs likewise. Buffers of received messages are kept for the next
/// ones (BufferPool), so the most that are in use at once count all the time.
///
/// What F keeps leaves the device when its OFFLOAD has been copied, and has its place there again from PREFETCH on; in
/// the pool it is from OFFLOAD until it is back. So does what crosses a border and waits: a message that a PREFETCH
/// brings is in the pool from the beginning. `copies`: from `copy_times`; one that is not there takes no time.
///
/// `points` false: only peaks are wanted.
///
/// Throws std::invalid_argument if the model does not fit the schedule, or `times` has other compute actions.
std::vector<StageMemory> memory_curves(const Schedule& schedule, const MemoryModel& model,
                                       const std::vector<std::vector<ActionTime>>& times,
                                       const std::vector<std::vector<ActionTime>>& copies = {}, bool points = true);

}  // namespace fold3d::core
