// TensorGroup over connections of our own.
#pragma once

#include <memory>
#include <utility>

#include "comm/tensor/tensor_sync.h"
#include "ops/tensor_group.h"

namespace fold3d::ops {

/// Of host memory, over a TensorSync.
class RingGroup final : public TensorGroup, public CutExchanges {
 public:
  explicit RingGroup(std::shared_ptr<comm::TensorSync> sync) : sync_(std::move(sync)) {}

  std::int64_t rank() const override { return sync_->rank(); }
  std::int64_t size() const override { return sync_->size(); }
  std::shared_ptr<Started> all_reduce(const at::Tensor& x, comm::Reduction reduction, bool in_place) override;
  std::shared_ptr<Started> reduce_scatter(const at::Tensor& x, std::int64_t dim) override;
  std::shared_ptr<Started> all_gather(const at::Tensor& x, std::int64_t dim, std::int64_t length) override;

  CutExchanges* cut() override { return this; }
  std::int64_t most(std::size_t bytes) const override;
  std::shared_ptr<Started> all_reduce(const at::Tensor& x, comm::Share share) override;
  std::shared_ptr<Started> reduce_scatter(const at::Tensor& x, std::int64_t dim, const at::Tensor& part,
                                          comm::Share share) override;
  std::shared_ptr<Started> all_gather(const at::Tensor& x, std::int64_t dim, const at::Tensor& whole,
                                      comm::Share share) override;

 private:
  comm::Exchange::Operation operation(const at::Tensor& x, comm::Reduction reduction, comm::Share share = {}) const;
  std::shared_ptr<Started> issue(comm::Exchange exchange, const at::Tensor& input, const at::Tensor& output);

  const std::shared_ptr<comm::TensorSync> sync_;
};

}  // namespace fold3d::ops
