#include "comm/base/tensor.h"

#include <limits>
#include <stdexcept>
#include <string>

namespace fold3d::comm {

std::size_t TensorDesc::bytes() const {
  if (element_bytes == 0) throw std::invalid_argument("a tensor's element size is 0 bytes; it must be at least 1");
  std::size_t total = element_bytes;
  for (const std::int64_t extent : shape) {
    if (extent < 0) {
      throw std::invalid_argument("a tensor's shape has the negative dimension " + std::to_string(extent));
    }
    const auto factor = static_cast<std::size_t>(extent);
    if (factor != 0 && total > std::numeric_limits<std::size_t>::max() / factor) {
      throw std::invalid_argument("a tensor's shape has more bytes than this machine can address");
    }
    total *= factor;
  }
  return total;
}

std::size_t payload_bytes(const Tensors& tensors) {
  std::size_t total = 0;
  for (const Tensor& tensor : tensors) total += tensor.buffer ? tensor.buffer->bytes() : 0;
  return total;
}

}  // namespace fold3d::comm
