#include "ops/c10d_group.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <utility>
#include <vector>

#include "comm/base/clock.h"
#include "comm/base/errors.h"

namespace fold3d::ops {
namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

class StartedWork final : public Started {
 public:
  /// `finish` makes the result of what the work leaves; none: `result` is it.
  StartedWork(Work work, at::Tensor result, std::shared_ptr<WaitLimits> limits, std::string what,
              std::function<at::Tensor()> finish = {})
      : work_(std::move(work)),
        result_(std::move(result)),
        limits_(std::move(limits)),
        what_(std::move(what)),
        finish_(std::move(finish)) {}

  void wait() override {
    if (!work_) return;
    if (result_.is_cpu()) {
      limits_->wait(*work_, what_);
    } else {
      work_->wait();  // which is to queue the next kernel
    }
    work_.reset();
    if (finish_) result_ = std::exchange(finish_, {})();
  }
  at::Tensor result() const override { return result_; }

 private:
  Work work_;
  at::Tensor result_;
  const std::shared_ptr<WaitLimits> limits_;
  const std::string what_;
  std::function<at::Tensor()> finish_;
};

std::string text_of(const char* what, const at::Tensor& x) {
  return std::string(what) + " of " + std::to_string(x.nbytes()) + " bytes";
}

}  // namespace

void WaitLimits::abort(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (aborted_.load()) return;
  reason_ = reason;
  aborted_.store(true);
}

void WaitLimits::check() {
  if (!aborted_.load()) return;
  const std::lock_guard lock(mutex_);
  throw comm::AbortedError(reason_);
}

void WaitLimits::wait(c10d::Work& work, const std::string& what) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  check();
  while (!work.isCompleted()) {
    try {
      if (work.wait(comm::kLook)) return;
    } catch (const std::exception&) {
      if (work.isCompleted()) throw;  // else it takes longer than a look
    }
    check();
    if (options_.while_waiting) options_.while_waiting();
    if (options_.timeout.count() > 0 && Clock::now() - begin > options_.timeout && !work.isCompleted()) {
      throw comm::TimeoutError(options_.name + ": the " + what + " was not done after " +
                               comm::seconds(options_.timeout) +
                               " (setting comm_timeout): another rank of the tensor-parallel group has not come");
    }
  }
  work.wait();  // throws what went wrong
}

C10dGroup::C10dGroup(const std::string& name, std::shared_ptr<WaitLimits> limits)
    : group_(c10d::resolve_process_group(name)), limits_(std::move(limits)) {}

std::shared_ptr<Started> C10dGroup::all_reduce(const at::Tensor& x, comm::Reduction reduction, bool in_place) {
  std::vector<at::Tensor> total{in_place ? x.detach() : x.detach().clone(at::MemoryFormat::Contiguous)};
  c10d::AllreduceOptions options;
  options.reduceOp = reduction == comm::Reduction::kSum ? c10d::ReduceOp::SUM : c10d::ReduceOp::MAX;
  const Work work = group_->allreduce(total, options);
  return std::make_shared<StartedWork>(work, total[0], limits_, text_of("all-reduce", x));
}

std::shared_ptr<Started> C10dGroup::reduce_scatter(const at::Tensor& x, std::int64_t dim) {
  const std::int64_t length = x.size(dim);
  at::Tensor whole = x.detach().movedim(dim, 0).contiguous();
  if (length % size() == 0 && !x.is_cpu()) {
    std::vector<std::int64_t> sizes = whole.sizes().vec();
    sizes[0] = length / size();
    at::Tensor part = at::empty(sizes, whole.options());
    const Work work = group_->reduce_scatter_single(part, whole);
    return std::make_shared<StartedWork>(work, part, limits_, text_of("reduce-scatter", x),
                                         [part, dim] { return part.movedim(0, dim).contiguous(); });
  }
  // NCCL knows equal parts only; gloo's own does not tell when it is complete.
  if (whole.is_alias_of(x)) whole = whole.clone();
  std::vector<at::Tensor> total{whole};
  const Work work = group_->allreduce(total);
  const std::int64_t first = rank() * (length / size()) + std::min(rank(), length % size());
  const std::int64_t own = part_length(length, rank(), size());
  return std::make_shared<StartedWork>(work, whole, limits_, text_of("reduce-scatter", x), [whole, first, own, dim] {
    return whole.narrow(0, first, own).movedim(0, dim).clone(at::MemoryFormat::Contiguous);
  });
}

std::shared_ptr<Started> C10dGroup::all_gather(const at::Tensor& x, std::int64_t dim, std::int64_t length) {
  const std::int64_t members = size(), longest = part_length(length, 0, members);
  at::Tensor part = x.detach().movedim(dim, 0).contiguous();
  std::vector<std::int64_t> sizes = part.sizes().vec();
  if (part.size(0) < longest) {  // the library knows equal parts only
    sizes[0] = longest;
    at::Tensor padded = at::empty(sizes, part.options());
    padded.narrow(0, 0, part.size(0)).copy_(part);
    part = padded;
  }
  sizes[0] = longest * members;
  at::Tensor whole = at::empty(sizes, part.options());
  const Work work = group_->all_gather_single(whole, part);
  return std::make_shared<StartedWork>(
      work, whole, limits_, text_of("all-gather", whole), [whole, part, dim, length, longest, members] {
        if (length == longest * members) return whole.movedim(0, dim).contiguous();
        std::vector<at::Tensor> parts;
        for (std::int64_t member = 0; member < members; ++member) {
          parts.push_back(whole.narrow(0, member * longest, part_length(length, member, members)));
        }
        return at::cat(parts, 0).movedim(0, dim).contiguous();
      });
}

}  // namespace fold3d::ops
