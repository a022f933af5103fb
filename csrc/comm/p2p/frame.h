#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "comm/base/tensor.h"
#include "core/ir/action.h"

namespace fold3d::comm {

/// Every message begins with one frame in a place of this size, so its receive can be posted before anything is known
/// about it. Most frames use a small part of it, see used_bytes().
inline constexpr std::size_t kFrameBytes = 2048;

/// A frame is never shorter, and so many bytes of it tell how long it is.
inline constexpr std::size_t kFramePrefixBytes = 32;

/// Bounds of what a frame may say, so that no damaged one makes its receiver reserve memory without end: no dtype of
/// torch has larger elements, no tensor more dimensions, and nobody sends an activation of so many bytes at once.
inline constexpr std::size_t kMostElementBytes = 16;
inline constexpr std::size_t kMostDimensions = 64;
inline constexpr std::uint64_t kMostPayloadBytes = std::uint64_t{64} << 30;

/// What a frame says. Layout (native byte order, which the magic number checks): magic, version, kind, whether the
/// payload is inline, number of tensors, used bytes of the frame, chunk, micro-batch, step, payload bytes; then per
/// tensor dtype, element size, requires_grad, number of dimensions and the dimensions; then, if inline, the tensors'
/// bytes one after the other. Otherwise each tensor that has bytes is one payload message.
struct Header {
  core::Action send;       ///< the SEND action it belongs to
  std::uint32_t step = 0;  ///< counts begin() calls, 1 for the first
  std::vector<TensorDesc> tensors;
  bool is_inline = false;
  std::span<const std::byte> payload;  ///< inside the frame; empty unless is_inline
};

/// Writes the frame of a message, with the payload if it fits and lies in host memory.
/// `frame` is kFrameBytes long. Returns whether the payload is inline. Throws std::invalid_argument when a tensor's
/// buffer is missing or does not have the size of its desc, when the message is beyond the bounds above, or when the
/// descriptions do not fit into a frame (about 50 tensors of 4 dimensions do).
bool write_frame(std::span<std::byte> frame, const core::Action& send, std::uint32_t step, const Tensors& tensors);

/// How many bytes of a frame say something, those of its prefix included: at most kFrameBytes. What comes after them
/// need not travel. `start`: at least the frame's prefix. Throws ProtocolError when it is not one of ours or its length
/// cannot be.
std::size_t used_bytes(std::span<const std::byte> start);

/// Reads a frame, and nothing of it beyond its used bytes. Throws ProtocolError when it is not one of ours, contradicts
/// itself or is beyond the bounds above.
Header read_frame(std::span<const std::byte> frame);

}  // namespace fold3d::comm
