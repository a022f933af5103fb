// torch.autocast for the device: torch's own lists of what runs in which dtype.
#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

using at::autocast::CastPolicy;

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// The lists call their macro with a name, or with a name and an overload.
#define PICK(name, overload, macro, ...) macro
#define LOW_2(op, overload) KERNEL_PRIVATEUSEONE(op, overload, lower_precision_fp)
#define LOW_1(op) KERNEL_PRIVATEUSEONE(op, lower_precision_fp)
#define LOW(...) PICK(__VA_ARGS__, LOW_2, LOW_1)(__VA_ARGS__)
#define FULL_2(op, overload) KERNEL_PRIVATEUSEONE(op, overload, fp32)
#define FULL_1(op) KERNEL_PRIVATEUSEONE(op, fp32)
#define FULL(...) PICK(__VA_ARGS__, FULL_2, FULL_1)(__VA_ARGS__)
#define SET_2(op, overload) KERNEL_PRIVATEUSEONE(op, overload, fp32_set_opt_dtype)
#define SET_1(op) KERNEL_PRIVATEUSEONE(op, fp32_set_opt_dtype)
#define SET(...) PICK(__VA_ARGS__, SET_2, SET_1)(__VA_ARGS__)
#define WIDEST_2(op, overload) KERNEL_PRIVATEUSEONE(op, overload, promote)
#define WIDEST_1(op) KERNEL_PRIVATEUSEONE(op, promote)
#define WIDEST(...) PICK(__VA_ARGS__, WIDEST_2, WIDEST_1)(__VA_ARGS__)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at;
  using namespace at::autocast;
  AT_FORALL_LOWER_PRECISION_FP(LOW)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(SET)
  AT_FORALL_PROMOTE(WIDEST)
}
