#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace fold3d::comm {

/// What a receiver must know about a tensor before its bytes arrive. Contiguous, row-major.
struct TensorDesc {
  std::uint8_t dtype = 0;          ///< code of the element type; opaque here (the runtime uses c10::ScalarType)
  std::uint8_t element_bytes = 1;  ///< size of one element, >= 1
  bool requires_grad = false;      ///< whether a gradient will travel back
  std::vector<std::int64_t> shape;

  /// Size of the data. Throws std::invalid_argument for a negative dimension, a zero element size or a
  /// product that does not fit into std::size_t.
  std::size_t bytes() const;

  bool operator==(const TensorDesc&) const = default;
};

/// A block of memory on the rank's device. The communicator shares it while a transfer is under way and never
/// looks inside, except to copy small messages that lie in host memory. A received buffer goes back to the
/// communicator's pool when its last shared_ptr goes: whoever makes a view of the memory must keep the
/// shared_ptr alive as long as the view.
class Buffer {
 public:
  virtual ~Buffer() = default;
  virtual std::size_t bytes() const = 0;
  /// First byte if the memory is host memory, else nullptr.
  virtual std::byte* host_data() = 0;
  /// Nobody holds it any more and it goes back to the pool: called on the thread that let go of it.
  virtual void returns() {}
};

struct Tensor {
  TensorDesc desc;
  std::shared_ptr<Buffer> buffer;  ///< buffer->bytes() == desc.bytes()
};

using Tensors = std::vector<Tensor>;

/// The bytes of all buffers; where one is missing, none.
std::size_t payload_bytes(const Tensors& tensors);

}  // namespace fold3d::comm
