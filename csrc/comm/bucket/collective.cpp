#include "comm/bucket/collective.h"

#include <stdexcept>

namespace fold3d::comm {

std::string name_of(NicArbiter::Traffic traffic, const Collective& collective) {
  return std::string(to_string(traffic)) + " of bucket " + std::to_string(collective.bucket) + " (step " +
         std::to_string(collective.step) + ")";
}

void check_collective(NicArbiter::Traffic traffic, const Collective& collective, int size) {
  const std::string name = "bucket " + std::to_string(collective.bucket);
  const std::size_t bytes = collective.buffer->bytes();
  if (bytes == 0 || bytes % (static_cast<std::size_t>(size) * collective.element_bytes) != 0) {
    throw std::invalid_argument(name + " has " + std::to_string(bytes / collective.element_bytes) +
                                " elements, which are not " + std::to_string(size) + " equal shards; pad it");
  }
  if (traffic == NicArbiter::Traffic::kReduce && collective.element == Number::kOther) {
    throw std::invalid_argument(name + " cannot be reduced: sums are made of float32 or float64 elements only");
  }
  if (collective.as_bfloat16 && collective.element != Number::kFloat32) {
    throw std::invalid_argument(name + " cannot travel as bfloat16: only float32 elements are rounded to it");
  }
}

}  // namespace fold3d::comm
