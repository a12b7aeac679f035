// How an op gets into the library. bindings/ is all that sees torch, and only its stable ABI. An op takes its arguments
// off the stack, checks them before anything is written, and calls cpu:: or cuda:: of core/args.h by the device of its
// tensors.
#pragma once

#include <torch/csrc/stable/library.h>

// Registers `op`, a function of this name in namespace accumkernels, for the devices that the library is built for.
#ifdef ACCUMKERNELS_WITH_CUDA
#define ACCUMKERNELS_REGISTER(op)                                                  \
  STABLE_TORCH_LIBRARY_IMPL(accumkernels, CPU, library) { library.impl(#op, op); } \
  STABLE_TORCH_LIBRARY_IMPL(accumkernels, CUDA, library) { library.impl(#op, op); }
#else
#define ACCUMKERNELS_REGISTER(op) \
  STABLE_TORCH_LIBRARY_IMPL(accumkernels, CPU, library) { library.impl(#op, op); }
#endif
