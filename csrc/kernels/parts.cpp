#include "kernels/parts.h"

#include <cstring>

namespace fold3d::kernels::cpu {

void copy_parts(const std::vector<Part>& parts) {
  for (const Part& part : parts) {
    if (part.bytes > 0) std::memcpy(part.to, part.from, part.bytes);
  }
}

}  // namespace fold3d::kernels::cpu
