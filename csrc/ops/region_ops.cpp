// The operators and what they do on each kind of device. Their gradients are in region_autograd.cpp.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <stdexcept>
#include <string>

#include "ops/handle.h"
#include "ops/sizes.h"
#include "ops/tensor_group.h"

namespace fold3d::ops {
namespace {

std::int64_t wrapped(const at::Tensor& x, std::int64_t dim) { return c10::maybe_wrap_dim(dim, x.dim()); }

comm::Reduction reduction_of(c10::string_view op) {
  if (op == "sum") return comm::Reduction::kSum;
  if (op == "max") return comm::Reduction::kMax;
  throw std::invalid_argument("op=\"" + std::string(op) + "\": TP.sync knows \"sum\" and \"max\"");
}

at::Tensor finished(const std::shared_ptr<Started>& started) {
  started->wait();
  return started->result();
}

at::Tensor meta_handle() { return at::empty({1}, at::TensorOptions().dtype(at::kLong).device(at::kMeta)); }

at::Tensor tp_copy_to_region(const at::Tensor& x, c10::string_view) { return x.alias(); }

at::Tensor tp_reduce_from_region(const at::Tensor& y, c10::string_view group) {
  return finished(find_group(std::string(group), y)->all_reduce(y, comm::Reduction::kSum, /*in_place=*/false));
}

at::Tensor tp_all_reduce(const at::Tensor& x, c10::string_view group, c10::string_view op) {
  return finished(find_group(std::string(group), x)->all_reduce(x, reduction_of(op), /*in_place=*/false));
}

at::Tensor tp_all_gather(const at::Tensor& x, std::int64_t dim, std::int64_t length, c10::string_view group) {
  return finished(find_group(std::string(group), x)->all_gather(x, wrapped(x, dim), length));
}

at::Tensor tp_reduce_scatter(const at::Tensor& x, std::int64_t dim, c10::string_view group) {
  return finished(find_group(std::string(group), x)->reduce_scatter(x, wrapped(x, dim)));
}

at::Tensor tp_scatter(const at::Tensor& x, std::int64_t dim, c10::string_view group) {
  const auto found = find_group(std::string(group), x);
  const Part part = part_of(x.sym_size(dim), found->rank(), found->size());
  return x.narrow_symint(dim, part.first, part.length).clone(at::MemoryFormat::Contiguous);
}

at::Tensor tp_all_reduce_start(const at::Tensor& x, c10::string_view group) {
  return handle_of(find_group(std::string(group), x)->all_reduce(x, comm::Reduction::kSum, /*in_place=*/false));
}

at::Tensor tp_all_reduce_start_(at::Tensor& x, c10::string_view group) {
  if (!x.is_contiguous()) throw std::invalid_argument("a sum in place needs a contiguous tensor");
  at::Tensor handle =
      handle_of(find_group(std::string(group), x)->all_reduce(x, comm::Reduction::kSum, /*in_place=*/true));
  x.unsafeGetTensorImpl()->bump_version();
  return handle;
}

at::Tensor tp_all_gather_start(const at::Tensor& x, std::int64_t dim, std::int64_t length, c10::string_view group) {
  return handle_of(find_group(std::string(group), x)->all_gather(x, wrapped(x, dim), length));
}

at::Tensor tp_reduce_scatter_start(const at::Tensor& x, std::int64_t dim, c10::string_view group) {
  return handle_of(find_group(std::string(group), x)->reduce_scatter(x, wrapped(x, dim)));
}

at::Tensor tp_wait(const at::Tensor& handle, const at::Tensor& x, c10::SymIntArrayRef size) {
  const at::Tensor result = finished(started_of(handle)).detach();  // what is waited for twice has two gradients
  if (result.sym_sizes() != size || result.scalar_type() != x.scalar_type()) {
    throw std::invalid_argument("tp_wait: the result is not of the size and type that were told");
  }
  return result;
}

void tp_finish(const at::Tensor& handle) { started_of(handle)->wait(); }

at::Tensor like_meta(const at::Tensor& x, c10::string_view) {
  return at::empty_symint(x.sym_sizes(), x.options().requires_grad(false));
}

at::Tensor all_reduce_meta(const at::Tensor& x, c10::string_view group, c10::string_view op) {
  reduction_of(op);
  return like_meta(x, group);
}

at::Tensor all_gather_meta(const at::Tensor& x, std::int64_t dim, c10::SymInt length, c10::string_view) {
  return empty_with(x, dim, length);
}

at::Tensor part_meta(const at::Tensor& x, std::int64_t dim, c10::string_view group) {
  const auto found = find_group(std::string(group), x);
  return empty_with(x, dim, part_of(x.sym_size(dim), found->rank(), found->size()).length);
}

at::Tensor start_meta(const at::Tensor&, c10::string_view) { return meta_handle(); }

at::Tensor start_in_place_meta(at::Tensor&, c10::string_view) { return meta_handle(); }

at::Tensor start_gather_meta(const at::Tensor&, std::int64_t, c10::SymInt, c10::string_view) { return meta_handle(); }

at::Tensor start_scatter_meta(const at::Tensor&, std::int64_t, c10::string_view) { return meta_handle(); }

at::Tensor wait_meta(const at::Tensor&, const at::Tensor& x, c10::SymIntArrayRef size) {
  return at::empty_symint(size, x.options().requires_grad(false));
}

void finish_meta(const at::Tensor&) {}

/// What host memory and device memory have in common: `find_group` knows the difference.
void implement(torch::Library& m) {
  m.impl("tp_copy_to_region", &tp_copy_to_region);
  m.impl("tp_reduce_from_region", &tp_reduce_from_region);
  m.impl("tp_all_reduce", &tp_all_reduce);
  m.impl("tp_all_gather", &tp_all_gather);
  m.impl("tp_reduce_scatter", &tp_reduce_scatter);
  m.impl("tp_scatter", &tp_scatter);
  m.impl("tp_all_reduce_start", &tp_all_reduce_start);
  m.impl("tp_all_reduce_start_", &tp_all_reduce_start_);
  m.impl("tp_all_gather_start", &tp_all_gather_start);
  m.impl("tp_reduce_scatter_start", &tp_reduce_scatter_start);
  m.impl("tp_wait", &tp_wait);
  m.impl("tp_finish", &tp_finish);
}

}  // namespace

TORCH_LIBRARY(fold3d, m) {
  m.def("tp_copy_to_region(Tensor(a) x, str group) -> Tensor(a)");
  m.def("tp_reduce_from_region(Tensor y, str group) -> Tensor");
  m.def("tp_all_reduce(Tensor x, str group, str op=\"sum\") -> Tensor");
  m.def("tp_all_gather(Tensor x, int dim, SymInt length, str group) -> Tensor");
  m.def("tp_reduce_scatter(Tensor x, int dim, str group) -> Tensor");
  m.def("tp_scatter(Tensor x, int dim, str group) -> Tensor");
  m.def("tp_all_reduce_start(Tensor x, str group) -> Tensor");
  m.def("tp_all_reduce_start_(Tensor(a!) x, str group) -> Tensor");
  m.def("tp_all_gather_start(Tensor x, int dim, SymInt length, str group) -> Tensor");
  m.def("tp_reduce_scatter_start(Tensor x, int dim, str group) -> Tensor");
  m.def("tp_wait(Tensor handle, Tensor x, SymInt[] size) -> Tensor");
  m.def("tp_finish(Tensor handle) -> ()");
}

TORCH_LIBRARY_IMPL(fold3d, CPU, m) { implement(m); }

TORCH_LIBRARY_IMPL(fold3d, CUDA, m) { implement(m); }

TORCH_LIBRARY_IMPL(fold3d, PrivateUse1, m) { implement(m); }

TORCH_LIBRARY_IMPL(fold3d, Meta, m) {
  m.impl("tp_copy_to_region", &tp_copy_to_region);
  m.impl("tp_reduce_from_region", &like_meta);
  m.impl("tp_all_reduce", &all_reduce_meta);
  m.impl("tp_all_gather", &all_gather_meta);
  m.impl("tp_reduce_scatter", &part_meta);
  m.impl("tp_scatter", &part_meta);
  m.impl("tp_all_reduce_start", &start_meta);
  m.impl("tp_all_reduce_start_", &start_in_place_meta);
  m.impl("tp_all_gather_start", &start_gather_meta);
  m.impl("tp_reduce_scatter_start", &start_scatter_meta);
  m.impl("tp_wait", &wait_meta);
  m.impl("tp_finish", &finish_meta);
}

}  // namespace fold3d::ops
