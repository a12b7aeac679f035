// The lists of ops that autocast runs in 16 bits, in fp32, or in the widest type of their arguments: torch's own.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace {

using namespace at;  // the macros name types without their namespace

#define IN_16_BITS(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define IN_FP32_BY_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define IN_THE_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

Tensor refuse(const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t) {
  TORCH_CHECK(false, "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.");
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(IN_16_BITS)
  AT_FORALL_FP32(IN_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(IN_FP32_BY_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(IN_THE_WIDEST)
  m.impl("binary_cross_entropy", TORCH_FN(refuse));
}

}  // namespace
