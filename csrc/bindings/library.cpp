// What the library says about itself, to ops/native.py.
#include <cstdio>

#include "../core/args.h"
#include "../cpu/product.h"
#include "build_info.h"
#include "device.h"
#ifdef ACCUMKERNELS_WITH_CUDA
#endif

#define AK_EXPORT extern "C" __attribute__((visibility("default")))

// What the library was built from and for, as JSON.
AK_EXPORT const char* accumkernels_build_info() { return ACCUMKERNELS_BUILD_INFO; }

AK_EXPORT const char* accumkernels_cpu_instruction_set() { return accumkernels::cpu::instruction_set(); }

// Whether accumkernels_add_product works on this processor with such operands, of core/args.h's DType.
AK_EXPORT int accumkernels_multiplies(int operands) {
  return accumkernels::cpu::product_tile(static_cast<accumkernels::DType>(operands)) != nullptr;
}

// See cpu/product.h. Not an op: the caller has its operands at hand, and beside MKL's function it is one more.
AK_EXPORT void accumkernels_add_product(float* view, const void* grad, const void* input, int operands, int64_t rows,
                                        int64_t columns, int64_t tokens, float alpha, int add) {
  const auto dtype = static_cast<accumkernels::DType>(operands);
  accumkernels::cpu::add_product({view, grad, input, dtype, rows, columns, tokens, alpha, add != 0},
                                 accumkernels::parallel_for);
}

// 0 where the CUDA kernels can run on the device, else an error code and, in message, its cause.
AK_EXPORT int accumkernels_probe(int device, char* message, int size) {
#ifdef ACCUMKERNELS_WITH_CUDA
  return accumkernels::cuda::probe(device, message, size);
#else
  (void)device;
  std::snprintf(message, size, "built without CUDA");
  return -1;
#endif
}
