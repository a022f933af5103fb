#include "ops/c10d_group.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "comm/base/clock.h"
#include "comm/base/errors.h"

namespace fold3d::ops {
namespace {

using Kind = comm::Exchange::Kind;
using Work = c10::intrusive_ptr<c10d::Work>;

class StartedWork final : public Started {
 public:
  /// `finish` makes the result of what the work leaves; none: `result` is it.
  StartedWork(Work work, at::Tensor result, std::shared_ptr<WaitLimits> limits,
              std::shared_ptr<comm::TensorAccount> account, std::string what, std::function<at::Tensor()> finish)
      : work_(std::move(work)),
        result_(std::move(result)),
        limits_(std::move(limits)),
        account_(std::move(account)),
        what_(std::move(what)),
        finish_(std::move(finish)) {}

  void wait() override {
    if (!work_) return;
    RECORD_USER_SCOPE("TP.sync wait");
    if (result_.is_cpu()) {
      std::optional<comm::TensorAccount::Waiting> waiting;
      if (account_) waiting.emplace(*account_);
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
  const std::shared_ptr<comm::TensorAccount> account_;
  const std::string what_;
  std::function<at::Tensor()> finish_;
};

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
      // That it takes longer than a look, or what went wrong with it. Whether it is complete does not tell which: it
      // may have become so since, for what is thrown holds a stack trace that takes its time.
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

C10dGroup::C10dGroup(const std::string& name, std::shared_ptr<WaitLimits> limits,
                     std::shared_ptr<comm::TensorAccount> account)
    : group_(c10d::resolve_process_group(name)), limits_(std::move(limits)), account_(std::move(account)) {}

/// `bytes` are those of the whole tensor, which goes round the ranks `rounds` times but for one part.
std::shared_ptr<Started> C10dGroup::start(Kind kind, std::size_t bytes, std::size_t rounds,
                                          const std::function<Work()>& issue, const at::Tensor& result,
                                          std::function<at::Tensor()> finish) {
  const auto members = static_cast<std::size_t>(size());
  const std::int64_t start_ns = account_ ? account_->begin() : 0;
  const auto completed = [account = account_, kind, start_ns, sent = rounds * (members - 1) * bytes / members] {
    account->end({.kind = kind, .issued_ns = start_ns, .start_ns = start_ns, .bytes = sent});
  };
  Work work;
  try {
    work = issue();
    if (account_) work->getFuture()->addCallback([completed](c10::ivalue::Future&) { completed(); });
  } catch (...) {
    if (account_) completed();
    throw;
  }
  return std::make_shared<StartedWork>(work, result, limits_, account_,
                                       std::string(comm::to_string(kind)) + " of " + std::to_string(bytes) + " bytes",
                                       std::move(finish));
}

std::shared_ptr<Started> C10dGroup::all_reduce(const at::Tensor& x, comm::Reduction reduction, bool in_place) {
  std::vector<at::Tensor> total{in_place ? x.detach() : x.detach().clone(at::MemoryFormat::Contiguous)};
  c10d::AllreduceOptions options;
  options.reduceOp = reduction == comm::Reduction::kSum ? c10d::ReduceOp::SUM : c10d::ReduceOp::MAX;
  return start(Kind::kAllReduce, x.nbytes(), 2, [&] { return group_->allreduce(total, options); }, total[0]);
}

std::shared_ptr<Started> C10dGroup::reduce_scatter(const at::Tensor& x, std::int64_t dim) {
  const std::int64_t length = x.size(dim);
  at::Tensor whole = x.detach().movedim(dim, 0).contiguous();
  if (length % size() == 0 && !x.is_cpu()) {
    std::vector<std::int64_t> sizes = whole.sizes().vec();
    sizes[0] = length / size();
    at::Tensor part = at::empty(sizes, whole.options());
    return start(
        Kind::kReduceScatter, x.nbytes(), 1, [&] { return group_->reduce_scatter_single(part, whole); }, part,
        [part, dim] { return part.movedim(0, dim).contiguous(); });
  }
  // NCCL knows equal parts only; gloo's own does not tell when it is complete.
  if (whole.is_alias_of(x)) whole = whole.clone();
  std::vector<at::Tensor> total{whole};
  const std::int64_t first = rank() * (length / size()) + std::min(rank(), length % size());
  const std::int64_t own = part_length(length, rank(), size());
  return start(
      Kind::kReduceScatter, x.nbytes(), 2, [&] { return group_->allreduce(total); }, whole,
      [whole, first, own, dim] {
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
  return start(
      Kind::kAllGather, whole.nbytes(), 1, [&] { return group_->all_gather_single(whole, part); }, whole,
      [whole, part, dim, length, longest, members] {
        if (length == longest * members) return whole.movedim(0, dim).contiguous();
        std::vector<at::Tensor> parts;
        for (std::int64_t member = 0; member < members; ++member) {
          parts.push_back(whole.narrow(0, member * longest, part_length(length, member, members)));
        }
        return at::cat(parts, 0).movedim(0, dim).contiguous();
      });
}

}  // namespace fold3d::ops
