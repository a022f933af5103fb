#include "ops/sizes.h"

#include <ATen/ops/empty.h>

#include <vector>

namespace fold3d::ops {

Part part_of(const c10::SymInt& length, std::int64_t rank, std::int64_t size) {
  const c10::SymInt shortest = length / size, longer = length % size;
  if (longer.sym_gt(rank).guard_bool(__FILE__, __LINE__)) return {(shortest + 1) * rank, shortest + 1};
  return {shortest * rank + longer, shortest};
}

at::Tensor empty_with(const at::Tensor& x, std::int64_t dim, const c10::SymInt& length) {
  std::vector<c10::SymInt> sizes = x.sym_sizes().vec();
  sizes[static_cast<std::size_t>(c10::maybe_wrap_dim(dim, x.dim()))] = length;
  return at::empty_symint(sizes, x.options().requires_grad(false));
}

}  // namespace fold3d::ops
