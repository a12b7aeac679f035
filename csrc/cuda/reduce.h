// Reductions in a fixed order: within a block, then over the blocks' partial results. No atomics, so that a result is
// bitwise the same from run to run.
#pragma once

#include <cuda_runtime.h>

#include "../core/args.h"
#include "../core/arithmetic.h"
#include "kernel.h"

namespace accumkernels::cuda {

template <Norm kNorm, class T>
__device__ T combine(T a, T b) {
  if constexpr (kNorm == Norm::kL2) {
    return a + b;
  } else {
    return larger(a, b);
  }
}

// The block's result, in thread 0 only. Called by every thread, with a barrier between two calls: they share memory.
template <Norm kNorm, int kBlockThreads>
__device__ double block_reduce(double value) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  constexpr int kWarps = kBlockThreads / 32;
  __shared__ double of_warps[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = combine<kNorm>(value, __shfl_down_sync(kAllLanes, value, distance));
  }
  if (lane == 0) of_warps[warp] = value;
  __syncthreads();
  if (warp == 0) {
    value = lane < kWarps ? of_warps[lane] : 0.0;  // 0 changes neither a sum of squares nor a largest magnitude
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      value = combine<kNorm>(value, __shfl_down_sync(kAllLanes, value, distance));
    }
  }
  return value;
}

// Over the partial results of `count` blocks, by one block of kFinishThreads; the result is in thread 0.
template <Norm kNorm>
__device__ double reduce_partials(const double* partials, int64_t count) {
  double value = 0.0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += kFinishThreads) value = combine<kNorm>(value, partials[i]);
  return block_reduce<kNorm, kFinishThreads>(value);
}

}  // namespace accumkernels::cuda
