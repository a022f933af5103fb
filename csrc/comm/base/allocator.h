#pragma once

#include <memory>

#include "comm/base/tensor.h"

namespace fold3d::comm {

/// Where memory for received tensors comes from. allocate() is called by the receiving threads.
class Allocator {
 public:
  virtual ~Allocator() = default;

  /// A step begins; called by the thread that computes, while no other call is under way.
  virtual void begin() {}

  /// Throws ProtocolError when there is no such tensor: a dtype that nobody knows, or whose elements have another size.
  /// Asked before memory is reserved for what a peer announces.
  virtual void check(const TensorDesc&) const {}

  /// Memory of desc.bytes() bytes on the rank's device. May later be reused for another desc of as many bytes.
  virtual std::shared_ptr<Buffer> allocate(const TensorDesc& desc) = 0;
};

}  // namespace fold3d::comm
