#include "runtime/kernels/kernel_ops.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/TensorOptions.h>
#include <torch/library.h>

#include <optional>

#include "kernels/adamw.h"
#include "kernels/parts.h"
#include "kernels/squares.h"
#include "runtime/device/device.h"

namespace fold3d::runtime {
namespace {

using kernels::Dtype;

Dtype dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Dtype::kFloat32;
    case at::kDouble:
      return Dtype::kFloat64;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    default:
      TORCH_CHECK(false, "kernels know float32, float64 and bfloat16, not ", tensor.scalar_type());
  }
}

/// Memory that is about to be written to; autograd, which may have kept the tensor for a backward, hears of it.
template <class Element = void>
Element* written(const at::Tensor& tensor) {
  tensor.unsafeGetTensorImpl()->bump_version();
  return static_cast<Element*>(tensor.mutable_data_ptr());
}

/// Of a number in host memory.
double value_of(const at::Tensor& number) {
  return number.scalar_type() == at::kDouble ? *number.const_data_ptr<double>() : *number.const_data_ptr<float>();
}

void check_number(const at::Tensor& number, const at::Tensor& beside, at::ScalarType on_device, const char* what) {
  TORCH_CHECK(number.numel() == 1, what, " must be one number, not ", number.sizes());
  if (number.is_cpu()) {
    TORCH_CHECK(number.scalar_type() == at::kFloat || number.scalar_type() == at::kDouble, what,
                " must be float32 or float64, not ", number.scalar_type());
  } else {
    TORCH_CHECK(number.device() == beside.device() && number.scalar_type() == on_device, what,
                " must be in host memory, or ", on_device, " on ", beside.device());
  }
}

void check_squares(const at::Tensor& flat, const at::Tensor& result) {
  TORCH_CHECK(flat.is_non_overlapping_and_dense(), "squares: the numbers must lie together");
  TORCH_CHECK(result.scalar_type() == at::kDouble && result.numel() == 2 && result.is_contiguous(),
              "squares: the result must be two numbers of float64");
  TORCH_CHECK(result.device() == flat.device(), "squares: the result must be on ", flat.device());
}

void squares_cpu(const at::Tensor& flat, const at::Tensor& result) {
  check_squares(flat, result);
  kernels::cpu::squares(dtype_of(flat), flat.const_data_ptr(), static_cast<std::size_t>(flat.numel()),
                        written<double>(result));
}

/// What the operator was called with, as the kernel takes it.
struct Adamw {
  kernels::AdamwDtypes dtypes{};
  std::vector<kernels::AdamwTensor> tensors;
  kernels::AdamwSettings settings{};
};

Adamw adamw_of(at::TensorList weights, at::TensorList gradients, at::TensorList means, at::TensorList squares,
               at::TensorList steps, at::TensorList masters, const at::Tensor& scale, double lr, double beta1,
               double beta2, double eps, double weight_decay) {
  const std::size_t count = weights.size();
  TORCH_CHECK(gradients.size() == count && means.size() == count && squares.size() == count && steps.size() == count &&
                  (masters.empty() || masters.size() == count),
              "adamw_: every weight needs a gradient, two moments, a step and, where there are any, a master weight");
  Adamw out;
  out.settings = {lr, beta1, beta2, eps, weight_decay};
  if (count == 0) return out;
  check_number(scale, weights[0], at::kDouble, "adamw_: scale");
  if (scale.is_cpu()) {
    out.settings.scale = value_of(scale);
  } else {
    out.settings.scale_at = scale.const_data_ptr<double>();
  }
  out.dtypes = {dtype_of(weights[0]), dtype_of(gradients[0]), dtype_of(means[0])};
  TORCH_CHECK(kernels::can_adamw(out.dtypes), "adamw_: no kernel for weights of ", weights[0].scalar_type(),
              ", gradients of ", gradients[0].scalar_type(), " and moments of ", means[0].scalar_type());
  for (std::size_t i = 0; i < count; ++i) {
    const at::Tensor& weight = weights[i];
    const auto check = [&](const at::Tensor& one, at::ScalarType dtype, const char* what) {
      TORCH_CHECK(one.scalar_type() == dtype && one.device() == weights[0].device(), "adamw_: ", what, " ", i, " is ",
                  one.scalar_type(), " on ", one.device(), ", not ", dtype, " on ", weights[0].device());
      TORCH_CHECK(one.sizes() == weight.sizes() && one.strides() == weight.strides(), "adamw_: ", what, " ", i,
                  " must lie in memory as its weight does");
    };
    TORCH_CHECK(weight.is_non_overlapping_and_dense(), "adamw_: the elements of weight ", i, " must lie together");
    check(weight, weights[0].scalar_type(), "weight");
    check(gradients[i], gradients[0].scalar_type(), "gradient");
    check(means[i], means[0].scalar_type(), "mean");
    check(squares[i], means[0].scalar_type(), "mean of squares");
    if (!masters.empty()) check(masters[i], at::kFloat, "master weight");
    check_number(steps[i], weight, at::kFloat, "adamw_: a step");
    const bool on_host = steps[i].is_cpu();
    out.tensors.push_back({.weight = written(weight),
                           .master = masters.empty() ? nullptr : written<float>(masters[i]),
                           .gradient = gradients[i].const_data_ptr(),
                           .mean = written(means[i]),
                           .square = written(squares[i]),
                           .step_at = on_host ? nullptr : steps[i].const_data_ptr<float>(),
                           .step = on_host ? value_of(steps[i]) : 0,
                           .count = static_cast<std::size_t>(weight.numel())});
  }
  return out;
}

void adamw_cpu(at::TensorList weights, at::TensorList gradients, at::TensorList means, at::TensorList squares,
               at::TensorList steps, at::TensorList masters, const at::Tensor& scale, double lr, double beta1,
               double beta2, double eps, double weight_decay) {
  const Adamw call =
      adamw_of(weights, gradients, means, squares, steps, masters, scale, lr, beta1, beta2, eps, weight_decay);
  kernels::cpu::adamw(call.dtypes, call.tensors, call.settings);
}

/// From `parts` to their places in the buffer, or back.
std::vector<kernels::Part> parts_of(at::TensorList parts, at::IntArrayRef offsets, const at::Tensor& buffer,
                                    bool back) {
  TORCH_CHECK(parts.size() == offsets.size(), parts.size(), " parts, but ", offsets.size(), " offsets");
  TORCH_CHECK(buffer.scalar_type() == at::kByte && buffer.dim() == 1 && buffer.is_contiguous(),
              "the buffer of parts must be flat bytes");
  std::vector<kernels::Part> out;
  out.reserve(parts.size());
  std::uint8_t* const packed = back ? nullptr : written<std::uint8_t>(buffer);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto bytes = static_cast<std::int64_t>(parts[i].nbytes());
    TORCH_CHECK(parts[i].is_contiguous() && parts[i].device() == buffer.device(), "part ", i,
                " must be contiguous and on ", buffer.device());
    TORCH_CHECK(offsets[i] >= 0 && offsets[i] + bytes <= buffer.numel(), "part ", i, " of ", bytes, " bytes at ",
                offsets[i], " is not within the ", buffer.numel(), " bytes of the buffer");
    const auto size = static_cast<std::size_t>(bytes);
    if (back) {
      out.push_back({buffer.const_data_ptr<std::uint8_t>() + offsets[i], written(parts[i]), size});
    } else {
      out.push_back({parts[i].const_data_ptr(), packed + offsets[i], size});
    }
  }
  return out;
}

void pack_cpu(at::TensorList parts, at::IntArrayRef offsets, const at::Tensor& buffer) {
  kernels::cpu::copy_parts(parts_of(parts, offsets, buffer, /*back=*/false));
}

void unpack_cpu(const at::Tensor& buffer, at::IntArrayRef offsets, at::TensorList parts) {
  kernels::cpu::copy_parts(parts_of(parts, offsets, buffer, /*back=*/true));
}

#ifdef FOLD3D_CUDA_KERNELS

void* stream_of(const at::Tensor& tensor) { return current_stream(tensor.device()).native_handle(); }

void squares_cuda(const at::Tensor& flat, const at::Tensor& result) {
  check_squares(flat, result);
  const auto count = static_cast<std::size_t>(flat.numel());
  const c10::DeviceGuard guard(flat.device());
  const at::Tensor partial =
      at::empty({static_cast<std::int64_t>(2 * kernels::squares_blocks(count))}, result.options());
  kernels::cuda::squares(dtype_of(flat), flat.const_data_ptr(), count, partial.mutable_data_ptr<double>(),
                         written<double>(result), stream_of(flat));
}

void adamw_cuda(at::TensorList weights, at::TensorList gradients, at::TensorList means, at::TensorList squares,
                at::TensorList steps, at::TensorList masters, const at::Tensor& scale, double lr, double beta1,
                double beta2, double eps, double weight_decay) {
  const Adamw call =
      adamw_of(weights, gradients, means, squares, steps, masters, scale, lr, beta1, beta2, eps, weight_decay);
  if (weights.empty()) return;
  const c10::DeviceGuard guard(weights[0].device());
  kernels::cuda::adamw(call.dtypes, call.tensors, call.settings, stream_of(weights[0]));
}

void pack_cuda(at::TensorList parts, at::IntArrayRef offsets, const at::Tensor& buffer) {
  const c10::DeviceGuard guard(buffer.device());
  kernels::cuda::copy_parts(parts_of(parts, offsets, buffer, /*back=*/false), stream_of(buffer));
}

void unpack_cuda(const at::Tensor& buffer, at::IntArrayRef offsets, at::TensorList parts) {
  const c10::DeviceGuard guard(buffer.device());
  kernels::cuda::copy_parts(parts_of(parts, offsets, buffer, /*back=*/true), stream_of(buffer));
}

#endif

const c10::OperatorHandle& pack_op() {
  static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow("fold3d::pack", "");
  return op;
}

}  // namespace

bool has_kernels(c10::Device device) {
  return pack_op().hasComputedKernelForDispatchKey(
      c10::DispatchKeySet(c10::computeDispatchKey(std::nullopt, std::nullopt, device)).highestPriorityTypeId());
}

void pack(const std::vector<at::Tensor>& parts, const std::vector<std::int64_t>& offsets, const at::Tensor& buffer) {
  pack_op().typed<void(at::TensorList, at::IntArrayRef, const at::Tensor&)>().call(parts, offsets, buffer);
}

TORCH_LIBRARY_FRAGMENT(fold3d, m) {
  // Adds to result[0] the sum of squares, and sets result[1] to 1 if anything is not finite.
  m.def("squares(Tensor flat, Tensor(a!) result) -> ()");
  m.def(
      "adamw_(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] means, Tensor(c!)[] squares, Tensor[] steps, "
      "Tensor(d!)[] masters, Tensor scale, float lr, float beta1, float beta2, float eps, float weight_decay) -> ()");
  m.def("pack(Tensor[] parts, int[] offsets, Tensor(a!) buffer) -> ()");
  m.def("unpack(Tensor buffer, int[] offsets, Tensor(a!)[] parts) -> ()");
}

TORCH_LIBRARY_IMPL(fold3d, CPU, m) {
  m.impl("squares", &squares_cpu);
  m.impl("adamw_", &adamw_cpu);
  m.impl("pack", &pack_cpu);
  m.impl("unpack", &unpack_cpu);
}

#ifdef FOLD3D_CUDA_KERNELS
TORCH_LIBRARY_IMPL(fold3d, CUDA, m) {
  m.impl("squares", &squares_cuda);
  m.impl("adamw_", &adamw_cuda);
  m.impl("pack", &pack_cuda);
  m.impl("unpack", &unpack_cuda);
}
#endif

}  // namespace fold3d::runtime
