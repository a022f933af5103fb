// TensorGroup: the ranks of a tensor-parallel group as torch's operators see them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "comm/base/number.h"
#include "comm/ring/exchange.h"

namespace fold3d::ops {

/// An exchange under way.
class Started {
 public:
  virtual ~Started() = default;
  /// Returns when the result is there (on CUDA: when the current stream waits for it). More than once is allowed.
  /// Throws what went wrong, naming the group's setting for how long it waits.
  virtual void wait() = 0;
  /// The result; its contents are not before wait().
  virtual at::Tensor result() const = 0;
};

/// How many of `length` elements a rank of `size` has: the lengths of consecutive parts differ by one at most, the
/// longer ones first.
std::int64_t part_length(std::int64_t length, std::int64_t rank, std::int64_t size);
/// Where the rank's part begins.
std::int64_t part_begin(std::int64_t length, std::int64_t rank, std::int64_t size);

/// Exchanges of which one share after the other travels (comm::Share), between tensors that are contiguous and that the
/// caller has made: what is computed of one while others travel is written where it belongs, and read where it arrives.
class CutExchanges {
 public:
  virtual ~CutExchanges() = default;
  /// Into how many exchanges one of so many bytes may be cut: each is worth its journey.
  virtual std::int64_t most(std::size_t bytes) const = 0;
  /// A share of the sum of everybody's `x`, in place.
  virtual std::shared_ptr<Started> all_reduce(const at::Tensor& x, comm::Share share) = 0;
  /// A share of `part`, this rank's along `dim` of the sum of everybody's `x`.
  virtual std::shared_ptr<Started> reduce_scatter(const at::Tensor& x, std::int64_t dim, const at::Tensor& part,
                                                  comm::Share share) = 0;
  /// A share of everybody's `x`, in `whole`, where this rank's is put, too.
  virtual std::shared_ptr<Started> all_gather(const at::Tensor& x, std::int64_t dim, const at::Tensor& whole,
                                              comm::Share share) = 0;
};

/// Collectives among the ranks of a tensor-parallel group. All of them make the same calls in the same order. None
/// blocks before Started::wait(), and none knows gradients. Inputs need not be contiguous; results are new and are.
class TensorGroup {
 public:
  virtual ~TensorGroup() = default;
  virtual std::int64_t rank() const = 0;
  virtual std::int64_t size() const = 0;

  /// The sum, or maximum, of everybody's `x`. In place if `in_place`: `x` is contiguous then.
  virtual std::shared_ptr<Started> all_reduce(const at::Tensor& x, comm::Reduction reduction, bool in_place) = 0;
  /// This rank's part along `dim` of the sum of everybody's `x`.
  virtual std::shared_ptr<Started> reduce_scatter(const at::Tensor& x, std::int64_t dim) = 0;
  /// Everybody's parts of a tensor of `length` along `dim`.
  virtual std::shared_ptr<Started> all_gather(const at::Tensor& x, std::int64_t dim, std::int64_t length) = 0;
  /// Those of the group that can be cut; none where they cannot.
  virtual CutExchanges* cut() { return nullptr; }
};

/// From now on tensors in host memory of the group of this name travel over `group`; those on a device go on over the
/// c10d group of this name. Throws std::invalid_argument when there is one already.
void add_group(const std::string& name, std::shared_ptr<TensorGroup> group);
/// Undoes add_group(), if it was that one.
void remove_group(const std::string& name, const TensorGroup* group) noexcept;
/// The group over which `x` travels. Throws c10::Error when there is none of this name.
std::shared_ptr<TensorGroup> find_group(const std::string& name, const at::Tensor& x);

}  // namespace fold3d::ops
