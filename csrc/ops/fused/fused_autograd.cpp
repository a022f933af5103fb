// Gradients of the operators that compute and communicate at the same time. Where gradients are to have gradients, they
// are made of the operators that do only one of both.
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add.h>
#include <ATen/ops/matmul.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ops/fused/overlapped.h"

namespace fold3d::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using Tensors = torch::autograd::variable_list;
using Optional = std::optional<at::Tensor>;
using OfInput = std::tuple<at::Tensor, std::vector<at::Tensor>>;

template <class Signature>
auto operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

OfInput all_gather_matmul(const at::Tensor& x, at::TensorList weights, std::int64_t dim, const c10::SymInt& length,
                          c10::string_view group, const Optional& known = {}) {
  using Signature =
      OfInput(const at::Tensor&, at::TensorList, std::int64_t, c10::SymInt, c10::string_view, const Optional&);
  static const auto op = operator_of<Signature>("fold3d::tp_all_gather_matmul");
  return op.call(x, weights, dim, length, group, known);
}

at::Tensor matmul_reduce_scatter(const at::Tensor& x, const at::Tensor& weight, std::int64_t dim,
                                 c10::string_view group, const Optional& known) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, std::int64_t, c10::string_view, const Optional&);
  static const auto op = operator_of<Signature>("fold3d::tp_matmul_reduce_scatter");
  return op.call(x, weight, dim, group, known);
}

at::Tensor matmul_all_reduce(const at::Tensor& x, const at::Tensor& weight, c10::string_view group,
                             const Optional& known) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, c10::string_view, const Optional&);
  static const auto op = operator_of<Signature>("fold3d::tp_matmul_all_reduce");
  return op.call(x, weight, group, known);
}

std::vector<at::Tensor> copy_matmul(const at::Tensor& x, at::TensorList weights, c10::string_view group) {
  using Signature = std::vector<at::Tensor>(const at::Tensor&, at::TensorList, c10::string_view);
  static const auto op = operator_of<Signature>("fold3d::tp_copy_matmul");
  return op.call(x, weights, group);
}

OfInput matmuls_backward(at::TensorList gradients, const Optional& addend, const at::Tensor& x, at::TensorList weights,
                         std::optional<std::int64_t> dim, c10::string_view group, const c10::List<bool>& needed) {
  using Signature = OfInput(at::TensorList, const Optional&, const at::Tensor&, at::TensorList,
                            std::optional<std::int64_t>, c10::string_view, const c10::List<bool>&);
  static const auto op = operator_of<Signature>("fold3d::tp_matmuls_backward");
  return op.call(gradients, addend, x, weights, dim, group, needed);
}

at::Tensor copy_to_region(const at::Tensor& x, c10::string_view group) {
  static const auto op = operator_of<at::Tensor(const at::Tensor&, c10::string_view)>("fold3d::tp_copy_to_region");
  return op.call(x, group);
}

/// The sum over the ranks, or this rank's part of it along `dim`.
at::Tensor summed(const at::Tensor& x, std::optional<std::int64_t> dim, c10::string_view group) {
  static const auto reduce =
      operator_of<at::Tensor(const at::Tensor&, c10::string_view)>("fold3d::tp_reduce_from_region");
  static const auto scatter =
      operator_of<at::Tensor(const at::Tensor&, std::int64_t, c10::string_view)>("fold3d::tp_reduce_scatter");
  return dim ? scatter.call(x, *dim, group) : reduce.call(x, group);
}

/// The gradients of x, or of its part along `dim`, and of the weights, from those of x's products with them, and of x
/// where it was read as it is.
struct Backward {
  Tensors gradients;  ///< of the products; undefined where nothing has read one
  at::Tensor addend;  ///< undefined where nothing has read x
  at::Tensor x;
  Tensors weights;
  std::optional<std::int64_t> dim;
  std::string group;

  Tensors run(bool needs_x, const std::vector<bool>& needs_weights) const {
    Tensors out(1 + weights.size());
    Tensors read, factors;
    c10::List<bool> needed;
    std::vector<std::size_t> places;
    for (std::size_t k = 0; k < weights.size(); ++k) {
      if (!gradients[k].defined()) continue;
      read.push_back(gradients[k]);
      factors.push_back(weights[k]);
      needed.push_back(needs_weights[k]);
      places.push_back(k);
    }
    if (needs_x && !read.empty() && !at::GradMode::is_enabled()) {
      const auto added = addend.defined() ? Optional(addend) : std::nullopt;
      auto [sum, others] = matmuls_backward(read, added, x, factors, dim, group, needed);
      out[0] = sum;
      for (std::size_t k = 0, other = 0; k < places.size(); ++k) {
        if (needed[k]) out[1 + places[k]] = others[other++];
      }
      return out;
    }
    at::Tensor sum = addend;
    for (std::size_t k = 0; k < places.size(); ++k) {
      if (needed[k]) out[1 + places[k]] = weight_gradient(x, read[k], factors[k]);
      if (!needs_x) continue;
      const at::Tensor product = at::matmul(read[k], factors[k].t());
      sum = sum.defined() ? at::add(sum, product) : product;
    }
    if (needs_x && sum.defined()) out[0] = summed(sum, dim, group);
    return out;
  }
};

std::vector<bool> needs(AutogradContext* context, std::size_t first, std::size_t count) {
  std::vector<bool> out;
  for (std::size_t k = 0; k < count; ++k) out.push_back(context->needs_input_grad(first + k));
  return out;
}

struct AllGatherMatmul : Function<AllGatherMatmul> {
  static Tensors forward(AutogradContext* context, const at::Tensor& x, at::TensorList weights, std::int64_t dim,
                         const c10::SymInt& length, const std::string& group, const Optional& known) {
    context->saved_data["group"] = group;
    context->saved_data["dim"] = dim;
    context->set_materialize_grads(false);
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [whole, products] = all_gather_matmul(x, weights, dim, length, group, known);
    Tensors saved{whole};
    saved.insert(saved.end(), weights.begin(), weights.end());
    context->save_for_backward(saved);
    Tensors out{whole};
    out.insert(out.end(), products.begin(), products.end());
    return out;
  }
  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    const Tensors saved = context->get_saved_variables();
    const std::size_t count = saved.size() - 1;
    const Backward made{.gradients = Tensors(gradients.begin() + 1, gradients.end()),
                        .addend = gradients[0],
                        .x = saved[0],
                        .weights = Tensors(saved.begin() + 1, saved.end()),
                        .dim = context->saved_data["dim"].toInt(),
                        .group = context->saved_data["group"].toStringRef()};
    Tensors out = made.run(context->needs_input_grad(0), needs(context, 1, count));
    out.resize(out.size() + 4);  // dim, length, group, known
    return out;
  }
};

struct CopyMatmul : Function<CopyMatmul> {
  static Tensors forward(AutogradContext* context, const at::Tensor& x, at::TensorList weights,
                         const std::string& group) {
    context->saved_data["group"] = group;
    context->set_materialize_grads(false);
    Tensors saved{x};
    saved.insert(saved.end(), weights.begin(), weights.end());
    context->save_for_backward(saved);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return copy_matmul(x, weights, group);
  }
  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    const Tensors saved = context->get_saved_variables();
    const Backward made{.gradients = gradients,
                        .addend = {},
                        .x = saved[0],
                        .weights = Tensors(saved.begin() + 1, saved.end()),
                        .dim = std::nullopt,
                        .group = context->saved_data["group"].toStringRef()};
    Tensors out = made.run(context->needs_input_grad(0), needs(context, 1, saved.size() - 1));
    out.resize(out.size() + 1);
    return out;
  }
};

struct MatmulReduceScatter : Function<MatmulReduceScatter> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, std::int64_t dim,
                            const std::string& group, const Optional& known) {
    context->saved_data["group"] = group;
    context->saved_data["dim"] = dim;
    context->saved_data["length"] = x.sym_size(dim);
    context->save_for_backward({x, weight});
    const at::AutoDispatchBelowADInplaceOrView guard;
    return matmul_reduce_scatter(x, weight, dim, group, known);
  }
  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    const Tensors saved = context->get_saved_variables();
    const c10::SymInt length = context->saved_data["length"].toSymInt();
    Tensors rights;
    if (context->needs_input_grad(0)) rights.push_back(saved[1].t());
    const auto [whole, products] = all_gather_matmul(gradients[0], rights, context->saved_data["dim"].toInt(), length,
                                                     context->saved_data["group"].toStringRef());
    Tensors out(5);
    if (context->needs_input_grad(0)) out[0] = products[0];
    if (context->needs_input_grad(1)) out[1] = weight_gradient(saved[0], whole, saved[1]);
    return out;
  }
};

struct MatmulAllReduce : Function<MatmulAllReduce> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const std::string& group, const Optional& known) {
    context->saved_data["group"] = group;
    context->save_for_backward({x, weight});
    const at::AutoDispatchBelowADInplaceOrView guard;
    return matmul_all_reduce(x, weight, group, known);
  }
  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    const Tensors saved = context->get_saved_variables();
    const at::Tensor gradient = copy_to_region(gradients[0], context->saved_data["group"].toStringRef());
    Tensors out(4);
    if (context->needs_input_grad(0)) out[0] = at::matmul(gradient, saved[1].t());
    if (context->needs_input_grad(1)) out[1] = weight_gradient(saved[0], gradient, saved[1]);
    return out;
  }
};

OfInput all_gather_matmul_autograd(const at::Tensor& x, at::TensorList weights, std::int64_t dim, c10::SymInt length,
                                   c10::string_view group, const Optional& known) {
  Tensors made = AllGatherMatmul::apply(x, weights, dim, length, std::string(group), known);
  return {made[0], std::vector<at::Tensor>(made.begin() + 1, made.end())};
}

std::vector<at::Tensor> copy_matmul_autograd(const at::Tensor& x, at::TensorList weights, c10::string_view group) {
  return CopyMatmul::apply(x, weights, std::string(group));
}

at::Tensor matmul_reduce_scatter_autograd(const at::Tensor& x, const at::Tensor& weight, std::int64_t dim,
                                          c10::string_view group, const Optional& known) {
  return MatmulReduceScatter::apply(x, weight, dim, std::string(group), known);
}

at::Tensor matmul_all_reduce_autograd(const at::Tensor& x, const at::Tensor& weight, c10::string_view group,
                                      const Optional& known) {
  return MatmulAllReduce::apply(x, weight, std::string(group), known);
}

}  // namespace

TORCH_LIBRARY_IMPL(fold3d, Autograd, m) {
  m.impl("tp_all_gather_matmul", &all_gather_matmul_autograd);
  m.impl("tp_copy_matmul", &copy_matmul_autograd);
  m.impl("tp_matmul_reduce_scatter", &matmul_reduce_scatter_autograd);
  m.impl("tp_matmul_all_reduce", &matmul_all_reduce_autograd);
  m.impl("tp_matmuls_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace fold3d::ops
