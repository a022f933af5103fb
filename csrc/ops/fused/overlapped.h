// Matrix products whose rows travel while others are computed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ops/tensor_group.h"

namespace fold3d::ops {

/// left [..., k] times right [k, n].
struct Factors {
  at::Tensor left, right;
};

/// A result, part of which may be on its way.
class Travelling {
 public:
  explicit Travelling(at::Tensor result) : result_(std::move(result)) {}
  /// Its result is that of the exchange.
  explicit Travelling(std::shared_ptr<Started> started) { add(std::move(started)); }
  void add(std::shared_ptr<Started> started) { started_.push_back(std::move(started)); }
  /// Returns it when it is there. Throws what Started::wait() does.
  at::Tensor get();

 private:
  at::Tensor result_;  // none: the last exchange's
  std::vector<std::shared_ptr<Started>> started_;
};

/// The sum of products, and of `addend` where there is one, summed over the ranks of the group: one piece after the
/// other begins to travel as it is computed. Lefts have the same dimensions but for the last one. The results' bits are
/// those of computing everything and then communicating, where the library computes rows of a product alike whatever
/// the number of others. None blocks before Travelling::get().
Travelling all_reduce_of(TensorGroup& group, const std::vector<Factors>& products,
                         const std::optional<at::Tensor>& addend);
/// Of that sum this rank's part along `dim`, which is not the last dimension.
Travelling reduce_scatter_of(TensorGroup& group, const std::vector<Factors>& products,
                             const std::optional<at::Tensor>& addend, std::int64_t dim);

struct Gathered {
  at::Tensor whole;                  ///< everybody's x, of `length` along `dim`
  std::vector<at::Tensor> products;  ///< it, times each of `rights`
};
/// Multiplies what has arrived while the rest travels, this rank's own part first. Blocks.
Gathered gather_and_multiply(TensorGroup& group, const at::Tensor& x, std::int64_t dim, std::int64_t length,
                             const std::vector<at::Tensor>& rights);

/// Of x times the weight, in the weight's layout, so that nobody copies it.
at::Tensor weight_gradient(const at::Tensor& x, const at::Tensor& gradient, const at::Tensor& weight);

}  // namespace fold3d::ops
