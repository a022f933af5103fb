#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

namespace fold3d::core {

/// What one cell of a schedule does; core/ir/action_kinds.cpp describes each. Texts are those of
/// torch.distributed.pipelining.
enum class Kind : std::uint8_t {
  kForward,          ///< "F": forward of a chunk on a micro-batch
  kBackward,         ///< "B": whole backward (input and weight gradients)
  kBackwardInput,    ///< "I": gradient of the input only
  kBackwardWeight,   ///< "W": gradient of the weights only, after "I"
  kSendForward,      ///< "SEND_F": a chunk's output leaves for the next chunk's stage
  kRecvForward,      ///< "RECV_F": a chunk's input arrives
  kSendBackward,     ///< "SEND_B": the gradient of a chunk's input leaves for the previous chunk's stage
  kRecvBackward,     ///< "RECV_B": the gradient of a chunk's output arrives
  kReduce,           ///< "REDUCE_GRAD": sum of a chunk's gradients over the data-parallel group (DP.sync)
  kRecompute,        ///< "RECOMPUTE": forward once more, for the graph that a backward needs and F did not keep
  kOffload,          ///< "OFFLOAD": what a forward stashed leaves the device for the pool
  kPrefetch,         ///< "PREFETCH": it comes back
  kOffloadForward,   ///< "OFFLOAD_F": a chunk's input, made on this rank, leaves the device for the pool
  kPrefetchForward,  ///< "PREFETCH_F": it comes back, or comes for the first time where a message brought it to the
                     ///< pool
  kOffloadBackward,  ///< "OFFLOAD_B": likewise the gradient of a chunk's output
  kPrefetchBackward  ///< "PREFETCH_B": likewise
};
inline constexpr int kNumKinds = 16;

/// One cell of a schedule: `kind` of `chunk` (its place in the model, from 0) on `micro_batch` (-1 for kReduce, which
/// has none).
struct Action {
  int chunk = 0;
  Kind kind = Kind::kForward;
  int micro_batch = -1;
  auto operator<=>(const Action&) const = default;
};

std::string_view to_string(Kind kind);

/// "2F0", "1SEND_F3", "0REDUCE_GRAD".
std::string to_string(const Action& action);

/// Inverse of to_string; spaces around the text are ignored. Throws std::invalid_argument naming the text and
/// the accepted forms.
Action parse_action(std::string_view text);

/// True for F, B, I, W and RECOMPUTE.
bool is_compute(Kind kind);
bool is_send(Kind kind);
bool is_recv(Kind kind);
/// True for OFFLOAD and PREFETCH, and for those of chunk borders: OFFLOAD_F, PREFETCH_F, OFFLOAD_B, PREFETCH_B.
bool is_copy(Kind kind);
/// Of these, true for those that take something away.
bool is_offload(Kind kind);

}  // namespace fold3d::core
