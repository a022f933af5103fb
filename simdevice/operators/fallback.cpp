#include "simdevice/operators/fallback.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <atomic>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "simdevice/device/current.h"
#include "simdevice/device/generator.h"
#include "simdevice/device/tensors.h"
#include "simdevice/operators/copies.h"
#include "simdevice/operators/factories.h"
#include "simdevice/operators/geometry.h"
#include "simdevice/operators/operator_facts.h"

namespace simdevice {

namespace {

using c10::IValue;
using torch::jit::Stack;

std::atomic<std::uint64_t> blocking_count{0};

/// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), facts_(facts_of(op)), stack_(*stack), count_(facts_.writes.size()), device_(find_device()) {}

  const c10::Device& device() const { return device_; }

  void run() {
    TORCH_CHECK(!facts_.is_view, "the simulated device has no kernel of its own for ", facts_.name,
                ", which returns views");
    TORCH_CHECK_NOT_IMPLEMENTED(facts_.has_cpu_kernel, "the simulated device runs operators by their CPU kernels, and ",
                                facts_.name, " has none");
    TORCH_CHECK(!facts_.is_random || facts_.generator >= 0, facts_.name,
                " draws random numbers but takes no generator: the simulated device could not repeat them");
    check_host_tensors();
    const std::shared_ptr<const Geometry> geometry =
        writes_in_place() ? nullptr : geometry_of(op_, facts_, arguments());
    if (geometry != nullptr || writes_in_place()) {
      run_asynchronously(geometry.get());
    } else {
      run_and_wait();
    }
  }

 private:
  const IValue* arguments() const { return stack_.data() + (stack_.size() - count_); }

  c10::Device find_device() const {
    std::optional<c10::Device> found;
    for (std::size_t i = 0; i < count_; ++i) {
      each_tensor(arguments()[i], [&](const at::Tensor& tensor) {
        if (!tensor.is_privateuseone()) return;
        if (!found) found = tensor.device();
        TORCH_CHECK(*found == tensor.device(), facts_.name,
                    ": expected all tensors to be on the same device, but found ", *found, " and ", tensor.device());
      });
      if (!found && arguments()[i].isDevice() && arguments()[i].toDevice().is_privateuseone()) {
        found = device_at(index_of(arguments()[i].toDevice()));
      }
    }
    return found.value_or(device_at(current_device()));
  }

  void check_host_tensors() const {
    for (std::size_t i = 0; i < count_; ++i) {
      each_tensor(arguments()[i], [&](const at::Tensor& tensor) {
        if (tensor.is_privateuseone()) return;
        TORCH_CHECK((tensor.dim() == 0 && !facts_.writes[i]) || facts_.takes_host_tensors, facts_.name,
                    ": expected all tensors to be on the same device, but found ", device_, " and ", tensor.device());
      });
    }
  }

  /// Whether nothing is returned but what was given, and nothing changes its size.
  bool writes_in_place() const {
    bool all = !facts_.has_out;
    for (const int from : facts_.returned) all &= from >= 0;
    bool any = false;
    for (const bool writes : facts_.writes) any |= writes;
    return all && any;
  }

  /// The arguments as the CPU kernel takes them. resized: tensors that it may write to and resize, in place of `out`
  /// arguments whose sizes are not known; null: they have the right size.
  Stack host_arguments(std::vector<Access>& accesses, bool out_is_new) const {
    Stack out;
    out.reserve(count_);
    for (std::size_t i = 0; i < count_; ++i) {
      const IValue& value = arguments()[i];
      const bool writes = facts_.writes[i];
      if (value.isDevice()) {
        out.emplace_back(c10::Device(c10::kCPU));
      } else if (static_cast<int>(i) == facts_.generator) {
        const auto given = value.isNone() ? std::nullopt : std::optional<at::Generator>(value.toGenerator());
        out.push_back(facts_.is_random || given ? IValue(launch_generator(given, device_.index())) : value);
      } else {
        out.push_back(map_tensors(value, [&](const at::Tensor& tensor) {
          if (!tensor.is_privateuseone()) return snapshot(tensor);
          add_access(accesses, tensor, writes);
          if (writes && out_is_new) return at::empty({0}, tensor.options().device(at::kCPU));
          return host_alias(tensor);
        }));
      }
    }
    return out;
  }

  void resize_outs(const Geometry& geometry) const {
    std::size_t next = 0;
    for (std::size_t i = 0; i < count_; ++i) {
      if (!facts_.writes[i]) continue;
      each_tensor(arguments()[i], [&](const at::Tensor& tensor) {
        const auto& sizes = geometry.written[next++];
        if (tensor.sizes() != c10::IntArrayRef(sizes)) resize_tensor(tensor, sizes, std::nullopt);
      });
    }
  }

  void run_asynchronously(const Geometry* geometry) {
    if (geometry != nullptr && facts_.has_out) resize_outs(*geometry);
    std::vector<Access> accesses;
    Stack host = host_arguments(accesses, false);
    Stack results;
    std::vector<std::vector<at::Tensor>> targets(facts_.returned.size());
    for (std::size_t i = 0; i < facts_.returned.size(); ++i) {
      if (facts_.returned[i] >= 0) {
        results.push_back(arguments()[facts_.returned[i]]);
        continue;
      }
      const Geometry::Value& value = geometry->returns[i];
      std::vector<at::Tensor> made;
      for (const Geometry::Shape& shape : value.tensors) {
        made.push_back(empty_on_device(shape.sizes, shape.strides, shape.dtype));
        add_access(accesses, made.back(), true);
        targets[i].push_back(host_alias(made.back()));
      }
      if (value.kind == Geometry::Kind::kList) {
        results.emplace_back(made);
      } else {
        results.emplace_back(made.empty() ? at::Tensor() : made.front());
      }
    }
    launch_kernel(current_stream(device_.index()), facts_.name, accesses,
                  [op = op_, host = std::move(host), targets = std::move(targets)]() mutable {
                    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &host);
                    for (std::size_t i = 0; i < targets.size(); ++i) keep_result(host[i], targets[i]);
                  });
    give(std::move(results));
  }

  static void keep_result(const IValue& result, const std::vector<at::Tensor>& targets) {
    if (targets.empty()) return;
    std::size_t next = 0;
    each_tensor(result, [&](const at::Tensor& tensor) {
      TORCH_CHECK(next < targets.size() && tensor.sizes() == targets[next].sizes(),
                  "the meta kernel and the CPU kernel disagree on the size of a result");
      targets[next++].copy_(tensor);
    });
  }

  void run_and_wait() {
    ++blocking_count;
    std::vector<Access> accesses;
    const Stack host = host_arguments(accesses, facts_.has_out);
    auto results = std::make_shared<Stack>(host);
    auto error = std::make_shared<std::exception_ptr>();
    Stream* const stream = current_stream(device_.index());
    launch_kernel(stream, facts_.name, accesses, [op = op_, results, error] {
      try {
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), results.get());
      } catch (...) {
        *error = std::current_exception();
      }
    });
    runtime().synchronize(stream);
    if (*error) std::rethrow_exception(*error);
    if (facts_.has_out) copy_outs(host);
    Stack out;
    for (std::size_t i = 0; i < facts_.returned.size(); ++i) {
      out.push_back(facts_.returned[i] >= 0
                        ? arguments()[facts_.returned[i]]
                        : map_tensors((*results)[i], [&](const at::Tensor& tensor) { return tensor.to(device_); }));
    }
    give(std::move(out));
  }

  void copy_outs(const Stack& host) const {
    for (std::size_t i = 0; i < count_; ++i) {
      if (!facts_.writes[i]) continue;
      std::vector<at::Tensor> written;
      each_tensor(host[i], [&](const at::Tensor& tensor) { written.push_back(tensor); });
      std::size_t next = 0;
      each_tensor(arguments()[i], [&](const at::Tensor& tensor) { copy_from_and_resize(written[next++], tensor); });
    }
  }

  void give(Stack results) {
    torch::jit::drop(stack_, count_);
    for (IValue& value : results) stack_.push_back(std::move(value));
  }

  const c10::OperatorHandle& op_;
  const OperatorFacts& facts_;
  Stack& stack_;
  const std::size_t count_;
  const c10::Device device_;
};

}  // namespace

std::uint64_t blocking_operators() { return blocking_count; }

void run_on_stream(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op, stack);
  const c10::DeviceGuard guard(call.device());
  call.run();
}

}  // namespace simdevice
