// What the library says about itself, to ops/native.py.
#include <cstdio>

#include "../cpu/kernels.h"
#include "build_info.h"
#ifdef ACCUMKERNELS_WITH_CUDA
#include "../cuda/launch.h"
#endif

#define AK_EXPORT extern "C" __attribute__((visibility("default")))

// What the library was built from and for, as JSON.
AK_EXPORT const char* accumkernels_build_info() { return ACCUMKERNELS_BUILD_INFO; }

AK_EXPORT const char* accumkernels_cpu_instruction_set() { return accumkernels::cpu::instruction_set(); }

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
