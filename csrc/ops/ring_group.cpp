#include "ops/ring_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <span>
#include <stdexcept>
#include <string>

namespace fold3d::ops {
namespace {

constexpr std::size_t kLeastShareBytes = 256u << 10;
constexpr std::int64_t kMostShares = 8;

class StartedExchange final : public Started {
 public:
  StartedExchange(std::shared_ptr<comm::TensorSync> sync, comm::TensorSync::Ticket ticket, at::Tensor result)
      : sync_(std::move(sync)), ticket_(ticket), result_(std::move(result)) {}

  void wait() override {
    RECORD_USER_SCOPE("TP.sync wait");
    sync_->wait(ticket_);
  }
  at::Tensor result() const override { return result_; }

 private:
  const std::shared_ptr<comm::TensorSync> sync_;
  const comm::TensorSync::Ticket ticket_;
  const at::Tensor result_;
};

/// What an exchange reads and writes. Detached: threads without the interpreter may be the last to let go of it.
struct Memory {
  at::Tensor input, output;
};

comm::Number number_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return comm::Number::kFloat32;
    case at::kDouble:
      return comm::Number::kFloat64;
    case at::kHalf:
      return comm::Number::kFloat16;
    case at::kBFloat16:
      return comm::Number::kBFloat16;
    case at::kInt:
      return comm::Number::kInt32;
    case at::kLong:
      return comm::Number::kInt64;
    default:
      return comm::Number::kOther;
  }
}

void check_summable(const at::Tensor& x) {
  if (number_of(x) != comm::Number::kOther) return;
  throw std::invalid_argument("TP.sync adds floating-point numbers and int32 or int64, not " +
                              std::string(c10::toString(x.scalar_type())));
}

std::span<const std::byte> bytes_of(const at::Tensor& x) {
  return {static_cast<const std::byte*>(x.const_data_ptr()), x.nbytes()};
}

std::span<std::byte> writable_bytes_of(const at::Tensor& x) {
  return {static_cast<std::byte*>(x.mutable_data_ptr()), x.nbytes()};
}

comm::Split split_of(const at::Tensor& x, std::int64_t dim, std::int64_t length) {
  std::size_t rows = 1, unit = x.element_size();
  for (std::int64_t d = 0; d < x.dim(); ++d) {
    if (d < dim) rows *= static_cast<std::size_t>(x.size(d));
    if (d > dim) unit *= static_cast<std::size_t>(x.size(d));
  }
  return {.rows = rows, .length = static_cast<std::size_t>(length), .unit_bytes = unit};
}

at::Tensor with_length(const at::Tensor& x, std::int64_t dim, std::int64_t length) {
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = length;
  return at::empty(sizes, x.options().requires_grad(false));
}

}  // namespace

comm::Exchange::Operation RingGroup::operation(const at::Tensor& x, comm::Reduction reduction,
                                               comm::Share share) const {
  return {.rank = sync_->rank(), .size = sync_->size(), .number = number_of(x), .reduction = reduction, .share = share};
}

std::shared_ptr<Started> RingGroup::issue(comm::Exchange exchange, const at::Tensor& input, const at::Tensor& output) {
  auto keep = std::make_shared<Memory>(Memory{input.detach(), output.detach()});
  const auto ticket = sync_->issue(std::move(exchange), std::move(keep));
  return std::make_shared<StartedExchange>(sync_, ticket, output);
}

std::shared_ptr<Started> RingGroup::all_reduce(const at::Tensor& x, comm::Reduction reduction, bool in_place) {
  check_summable(x);
  const at::Tensor input = x.contiguous();
  const at::Tensor output = in_place ? x : at::empty_like(input, at::MemoryFormat::Contiguous);
  return issue(comm::Exchange::all_reduce(operation(x, reduction), bytes_of(input), writable_bytes_of(output)), input,
               output);
}

std::shared_ptr<Started> RingGroup::reduce_scatter(const at::Tensor& x, std::int64_t dim) {
  return reduce_scatter(x.contiguous(), dim, with_length(x, dim, part_length(x.size(dim), rank(), size())), {});
}

std::shared_ptr<Started> RingGroup::all_gather(const at::Tensor& x, std::int64_t dim, std::int64_t length) {
  return all_gather(x.contiguous(), dim, with_length(x, dim, length), {});
}

std::int64_t RingGroup::most(std::size_t bytes) const {
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(bytes / kLeastShareBytes), 1, kMostShares);
}

std::shared_ptr<Started> RingGroup::all_reduce(const at::Tensor& x, comm::Share share) {
  check_summable(x);
  return issue(
      comm::Exchange::all_reduce(operation(x, comm::Reduction::kSum, share), bytes_of(x), writable_bytes_of(x)), x, x);
}

std::shared_ptr<Started> RingGroup::reduce_scatter(const at::Tensor& x, std::int64_t dim, const at::Tensor& part,
                                                   comm::Share share) {
  check_summable(x);
  return issue(comm::Exchange::reduce_scatter(operation(x, comm::Reduction::kSum, share), split_of(x, dim, x.size(dim)),
                                              bytes_of(x), writable_bytes_of(part)),
               x, part);
}

std::shared_ptr<Started> RingGroup::all_gather(const at::Tensor& x, std::int64_t dim, const at::Tensor& whole,
                                               comm::Share share) {
  return issue(comm::Exchange::all_gather(operation(x, comm::Reduction::kSum, share), split_of(x, dim, whole.size(dim)),
                                          bytes_of(x), writable_bytes_of(whole)),
               x, whole);
}

}  // namespace fold3d::ops
