// The contents of the library: its ops, each in bindings/OP.cpp. This file and bindings/ are all that sees torch, and
// only its stable ABI.
#include "bindings/ops.h"

namespace accumkernels {
namespace {

void register_all(torch::stable::detail::StableLibrary& library) {
  library.impl("accumulate_", accumulate_);
  library.impl("check_finite_", check_finite_);
  library.impl("judge_", judge_);
  library.impl("norm_", norm_);
  library.impl("scaled_copy_", scaled_copy_);
}

STABLE_TORCH_LIBRARY_IMPL(accumkernels, CPU, library) { register_all(library); }
#ifdef ACCUMKERNELS_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(accumkernels, CUDA, library) { register_all(library); }
#endif

}  // namespace
}  // namespace accumkernels
