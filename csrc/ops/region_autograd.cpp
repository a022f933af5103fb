// Gradients of the operators: of each the one of its mirror image, so that gradients of gradients are right, too.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>

namespace fold3d::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using Tensors = torch::autograd::variable_list;

template <class Signature>
auto operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

using OfGroup = at::Tensor(const at::Tensor&, c10::string_view);
using OfPart = at::Tensor(const at::Tensor&, std::int64_t, c10::string_view);
using OfWhole = at::Tensor(const at::Tensor&, std::int64_t, c10::SymInt, c10::string_view);
using OfHandle = at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymIntArrayRef);

at::Tensor copy_to_region(const at::Tensor& x, c10::string_view group) {
  static const auto op = operator_of<OfGroup>("fold3d::tp_copy_to_region");
  return op.call(x, group);
}

at::Tensor reduce_from_region(const at::Tensor& y, c10::string_view group) {
  static const auto op = operator_of<OfGroup>("fold3d::tp_reduce_from_region");
  return op.call(y, group);
}

at::Tensor all_gather(const at::Tensor& x, std::int64_t dim, c10::SymInt length, c10::string_view group) {
  static const auto op = operator_of<OfWhole>("fold3d::tp_all_gather");
  return op.call(x, dim, std::move(length), group);
}

at::Tensor reduce_scatter(const at::Tensor& x, std::int64_t dim, c10::string_view group) {
  static const auto op = operator_of<OfPart>("fold3d::tp_reduce_scatter");
  return op.call(x, dim, group);
}

at::Tensor scatter(const at::Tensor& x, std::int64_t dim, c10::string_view group) {
  static const auto op = operator_of<OfPart>("fold3d::tp_scatter");
  return op.call(x, dim, group);
}

at::Tensor wait(const at::Tensor& handle, const at::Tensor& x, c10::SymIntArrayRef size) {
  static const auto op = operator_of<OfHandle>("fold3d::tp_wait");
  return op.call(handle, x, size);
}

void save(AutogradContext* context, c10::string_view group, std::int64_t dim = 0) {
  context->saved_data["group"] = std::string(group);
  context->saved_data["dim"] = dim;
}

std::string group_of(AutogradContext* context) { return context->saved_data["group"].toStringRef(); }

std::int64_t dim_of(AutogradContext* context) { return context->saved_data["dim"].toInt(); }

struct CopyToRegion : Function<CopyToRegion> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const std::string& group) {
    save(context, group);
    return x.view_as(x);  // known to every part of torch as a view
  }
  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    return {reduce_from_region(gradients[0], group_of(context)), at::Tensor()};
  }
};

struct ReduceFromRegion : Function<ReduceFromRegion> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& y, const std::string& group) {
    save(context, group);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return reduce_from_region(y, group);
  }
  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    return {copy_to_region(gradients[0], group_of(context)), at::Tensor()};
  }
};

struct AllGather : Function<AllGather> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, std::int64_t dim, c10::SymInt length,
                            const std::string& group) {
    save(context, group, dim);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return all_gather(x, dim, std::move(length), group);
  }
  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    return {reduce_scatter(gradients[0], dim_of(context), group_of(context)), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

struct ReduceScatter : Function<ReduceScatter> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& y, std::int64_t dim, const std::string& group) {
    save(context, group, dim);
    context->saved_data["length"] = y.sym_size(dim);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return reduce_scatter(y, dim, group);
  }
  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    const c10::SymInt length = context->saved_data["length"].toSymInt();
    return {all_gather(gradients[0], dim_of(context), length, group_of(context)), at::Tensor(), at::Tensor()};
  }
};

/// Of parts of something that all ranks have whole: so has its gradient.
struct GatherParts : Function<GatherParts> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, std::int64_t dim, c10::SymInt length,
                            const std::string& group) {
    save(context, group, dim);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return all_gather(x, dim, std::move(length), group);
  }
  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    return {scatter(gradients[0], dim_of(context), group_of(context)), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

struct Scatter : Function<Scatter> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, std::int64_t dim, const std::string& group) {
    save(context, group, dim);
    context->saved_data["length"] = x.sym_size(dim);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return scatter(x, dim, group);
  }
  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    const c10::SymInt length = context->saved_data["length"].toSymInt();
    return {GatherParts::apply(gradients[0], dim_of(context), length, group_of(context)), at::Tensor(), at::Tensor()};
  }
};

/// Of a started sum: as ReduceFromRegion, of the tensor that was summed.
struct Wait : Function<Wait> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& handle, const at::Tensor& x,
                            c10::SymIntArrayRef size) {
    context->saved_data["same"] = x.sym_sizes() == size;
    const at::AutoDispatchBelowADInplaceOrView guard;
    return wait(handle, x, size);
  }
  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    TORCH_CHECK(context->saved_data["same"].toBool(),
                "only a sum that was started has a gradient; use tp_all_gather or tp_reduce_scatter");
    return {at::Tensor(), gradients[0], at::Tensor()};
  }
};

at::Tensor copy_autograd(const at::Tensor& x, c10::string_view group) {
  return CopyToRegion::apply(x, std::string(group));
}

at::Tensor reduce_autograd(const at::Tensor& y, c10::string_view group) {
  return ReduceFromRegion::apply(y, std::string(group));
}

at::Tensor all_gather_autograd(const at::Tensor& x, std::int64_t dim, c10::SymInt length, c10::string_view group) {
  return AllGather::apply(x, dim, std::move(length), std::string(group));
}

at::Tensor reduce_scatter_autograd(const at::Tensor& y, std::int64_t dim, c10::string_view group) {
  return ReduceScatter::apply(y, dim, std::string(group));
}

at::Tensor scatter_autograd(const at::Tensor& x, std::int64_t dim, c10::string_view group) {
  return Scatter::apply(x, dim, std::string(group));
}

at::Tensor wait_autograd(const at::Tensor& handle, const at::Tensor& x, c10::SymIntArrayRef size) {
  return Wait::apply(handle, x, size);
}

}  // namespace

TORCH_LIBRARY_IMPL(fold3d, Autograd, m) {
  m.impl("tp_copy_to_region", &copy_autograd);
  m.impl("tp_reduce_from_region", &reduce_autograd);
  m.impl("tp_all_gather", &all_gather_autograd);
  m.impl("tp_reduce_scatter", &reduce_scatter_autograd);
  m.impl("tp_scatter", &scatter_autograd);
  m.impl("tp_wait", &wait_autograd);
  for (const char* name : {"tp_all_reduce", "tp_all_reduce_start", "tp_all_reduce_start_", "tp_all_gather_start",
                           "tp_reduce_scatter_start", "tp_finish"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace fold3d::ops
