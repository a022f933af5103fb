// Operators that compute and communicate at the same time: the matrix products at the borders of a region, whose inputs
// or results travel. Their gradients are in fused_autograd.cpp.
#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <torch/library.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "ops/fused/overlapped.h"
#include "ops/sizes.h"
#include "ops/tensor_group.h"

namespace fold3d::ops {
namespace {

using Optional = std::optional<at::Tensor>;
using OfInput = std::tuple<at::Tensor, std::vector<at::Tensor>>;

std::int64_t wrapped(const at::Tensor& x, std::int64_t dim) {
  const std::int64_t found = c10::maybe_wrap_dim(dim, x.dim());
  if (found == x.dim() - 1) throw std::invalid_argument("the last dimension is that of the matrix product");
  return found;
}

std::vector<at::Tensor> multiplied(const at::Tensor& x, at::TensorList weights) {
  std::vector<at::Tensor> out;
  for (const at::Tensor& weight : weights) out.push_back(at::matmul(x, weight));
  return out;
}

OfInput tp_all_gather_matmul(const at::Tensor& x, at::TensorList weights, std::int64_t dim, std::int64_t length,
                             c10::string_view group, const Optional& known) {
  if (known) {
    at::Tensor whole = known->clone(at::MemoryFormat::Contiguous);
    std::vector<at::Tensor> products = multiplied(whole, weights);
    return {std::move(whole), std::move(products)};
  }
  const auto found = find_group(std::string(group), x);
  Gathered made = gather_and_multiply(*found, x, wrapped(x, dim), length, weights.vec());
  return {std::move(made.whole), std::move(made.products)};
}

at::Tensor tp_matmul_reduce_scatter(const at::Tensor& x, const at::Tensor& weight, std::int64_t dim,
                                    c10::string_view group, const Optional& known) {
  if (known) return known->clone(at::MemoryFormat::Contiguous);
  return reduce_scatter_of(*find_group(std::string(group), x), {{x, weight}}, {}, wrapped(x, dim)).get();
}

at::Tensor tp_matmul_all_reduce(const at::Tensor& x, const at::Tensor& weight, c10::string_view group,
                                const Optional& known) {
  if (known) return known->clone(at::MemoryFormat::Contiguous);
  return all_reduce_of(*find_group(std::string(group), x), {{x, weight}}, {}).get();
}

std::vector<at::Tensor> tp_copy_matmul(const at::Tensor& x, at::TensorList weights, c10::string_view) {
  return multiplied(x, weights);
}

std::vector<at::Tensor> weight_gradients(const at::Tensor& whole, at::TensorList gradients, at::TensorList weights,
                                         const c10::List<bool>& needed) {
  std::vector<at::Tensor> out;
  for (std::size_t k = 0; k < weights.size(); ++k) {
    if (needed[k]) out.push_back(weight_gradient(whole, gradients[k], weights[k]));
  }
  return out;
}

OfInput tp_matmuls_backward(at::TensorList gradients, const Optional& addend, const at::Tensor& x,
                            at::TensorList weights, std::optional<std::int64_t> dim, c10::string_view group,
                            const c10::List<bool>& needed) {
  const auto found = find_group(std::string(group), x);
  std::vector<Factors> products;
  for (std::size_t k = 0; k < weights.size(); ++k) products.push_back({gradients[k], weights[k].t()});
  Travelling total =
      dim ? reduce_scatter_of(*found, products, addend, wrapped(x, *dim)) : all_reduce_of(*found, products, addend);
  // What comes next waits for the sum only, so these hide it.
  std::vector<at::Tensor> others = weight_gradients(x, gradients, weights, needed);
  return {total.get(), std::move(others)};
}

OfInput all_gather_matmul_meta(const at::Tensor& x, at::TensorList weights, std::int64_t dim, c10::SymInt length,
                               c10::string_view, const Optional&) {
  at::Tensor whole = empty_with(x, wrapped(x, dim), length);
  std::vector<at::Tensor> products = multiplied(whole, weights);
  return {std::move(whole), std::move(products)};
}

at::Tensor matmul_reduce_scatter_meta(const at::Tensor& x, const at::Tensor& weight, std::int64_t dim,
                                      c10::string_view group, const Optional&) {
  const at::Tensor whole = at::matmul(x, weight);
  const auto found = find_group(std::string(group), x);
  const std::int64_t along = wrapped(x, dim);
  return empty_with(whole, along, part_of(whole.sym_size(along), found->rank(), found->size()).length);
}

at::Tensor matmul_all_reduce_meta(const at::Tensor& x, const at::Tensor& weight, c10::string_view, const Optional&) {
  return at::matmul(x, weight);
}

OfInput matmuls_backward_meta(at::TensorList gradients, const Optional&, const at::Tensor& x, at::TensorList weights,
                              std::optional<std::int64_t> dim, c10::string_view group, const c10::List<bool>& needed) {
  at::Tensor total = at::empty_symint(x.sym_sizes(), x.options().requires_grad(false));
  if (dim) {
    const auto found = find_group(std::string(group), x);
    const std::int64_t along = wrapped(x, *dim);
    total = empty_with(x, along, part_of(x.sym_size(along), found->rank(), found->size()).length);
  }
  std::vector<at::Tensor> others = weight_gradients(x, gradients, weights, needed);
  return {std::move(total), std::move(others)};
}

void implement(torch::Library& m) {
  m.impl("tp_all_gather_matmul", &tp_all_gather_matmul);
  m.impl("tp_matmul_reduce_scatter", &tp_matmul_reduce_scatter);
  m.impl("tp_matmul_all_reduce", &tp_matmul_all_reduce);
  m.impl("tp_copy_matmul", &tp_copy_matmul);
  m.impl("tp_matmuls_backward", &tp_matmuls_backward);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fold3d, m) {
  m.def(
      "tp_all_gather_matmul(Tensor x, Tensor[] weights, int dim, SymInt length, str group, Tensor? known=None)"
      " -> (Tensor, Tensor[])");
  m.def("tp_matmul_reduce_scatter(Tensor x, Tensor weight, int dim, str group, Tensor? known=None) -> Tensor");
  m.def("tp_matmul_all_reduce(Tensor x, Tensor weight, str group, Tensor? known=None) -> Tensor");
  m.def("tp_copy_matmul(Tensor x, Tensor[] weights, str group) -> Tensor[]");
  m.def(
      "tp_matmuls_backward(Tensor[] gradients, Tensor? addend, Tensor x, Tensor[] weights, int? dim, str group,"
      " bool[] needed) -> (Tensor, Tensor[])");
}

TORCH_LIBRARY_IMPL(fold3d, CPU, m) { implement(m); }

TORCH_LIBRARY_IMPL(fold3d, CUDA, m) { implement(m); }

TORCH_LIBRARY_IMPL(fold3d, PrivateUse1, m) { implement(m); }

TORCH_LIBRARY_IMPL(fold3d, Meta, m) {
  m.impl("tp_all_gather_matmul", &all_gather_matmul_meta);
  m.impl("tp_matmul_reduce_scatter", &matmul_reduce_scatter_meta);
  m.impl("tp_matmul_all_reduce", &matmul_all_reduce_meta);
  m.impl("tp_copy_matmul", &tp_copy_matmul);
  m.impl("tp_matmuls_backward", &matmuls_backward_meta);
}

}  // namespace fold3d::ops
