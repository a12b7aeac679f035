// Launching a kernel, and dispatch on a dtype inside one.
#pragma once

#include <cuda_runtime.h>

#include "../core/args.h"
#include "../core/numeric.h"
#include "units.h"

namespace accumkernels::cuda {

// What a kernel's arguments may take: 32,764 bytes since CUDA 12.1 (sm_70, driver R530), 4 KB before.
constexpr int kParameterBytes = CUDART_VERSION >= 12010 ? 32764 : 4096;

constexpr int kThreads = 256;  // of a block that streams elements
constexpr int kWarps = kThreads / kWarp;
constexpr int kFinishThreads = 1024;  // of the one block that adds up partial results

// The arguments go by address, so that a 32 KB table is copied once, by the driver.
template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), int64_t blocks, int threads, void* stream,
                          const Arguments&... arguments) {
  static_assert((std::is_same_v<std::decay_t<Parameters>, Arguments> && ...), "argument types must match exactly");
  static_assert((sizeof(Arguments) + ...) <= kParameterBytes, "kernel arguments too large");
  void* addresses[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  return cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)), addresses,
                          0, static_cast<cudaStream_t>(stream));
}

// Calls function with a constant, std::true_type or std::false_type.
template <class Function>
__device__ auto with_constant(bool value, Function function) {
  return value ? function(std::true_type()) : function(std::false_type());
}

// Calls function with a pointer of the element type. Inside a kernel, so that one launch takes mixed lists.
template <class Function>
__device__ void with_elements(const void* data, DType dtype, Function function) {
  switch (dtype) {
    case DType::kFloat16:
      return function(static_cast<const Float16*>(data));
    case DType::kBFloat16:
      return function(static_cast<const BFloat16*>(data));
    case DType::kFloat32:
      return function(static_cast<const float*>(data));
    case DType::kFloat64:
      return function(static_cast<const double*>(data));
  }
}

}  // namespace accumkernels::cuda
