// Streaming through a piece of a tensor: who takes which elements, and how they are loaded and stored.
//
// Thread t takes elements [t * kWidth, (t + 1) * kWidth) of every stripe of kThreads * kWidth elements, kUnroll stripes
// at a time. Alignment decides only how elements are loaded, 16 bytes at once or one by one, not who takes them: the
// order of a sum does not depend on it.
#pragma once

#include <cuda_runtime.h>

#include "blocks.h"
#include "kernel.h"

namespace accumkernels::cuda {

__device__ inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Elements per access: 16 bytes of the narrower type, several times 16 of the wider one.
template <class... T>
constexpr int kWidthOf = 0;
template <class T>
constexpr int kWidthOf<T> = 16 / sizeof(T);
template <class A, class B>
constexpr int kWidthOf<A, B> = kWidthOf<A> > kWidthOf<B> ? kWidthOf<A> : kWidthOf<B>;

// Stripes to have in flight: about 128 bytes per thread hide the latency even at half occupancy, more would spill. A
// full piece holds a whole number of rounds.
template <int kWidth, int kBytesPerElement>
constexpr int kUnrollOf = kWidth * kBytesPerElement > 64   ? 1
                          : kWidth * kBytesPerElement > 32 ? 2
                          : kWidth > 4                     ? 2
                                                           : 4;

template <bool kAligned, int kWidth, class T>
__device__ void load(const T* from, T (&values)[kWidth]) {
  constexpr int kBytes = kWidth * sizeof(T);
  if constexpr (kAligned && kBytes % 16 == 0) {
    uint4 words[kBytes / 16];
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) words[i] = reinterpret_cast<const uint4*>(from)[i];
    memcpy(values, words, kBytes);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = from[i];
  }
}

template <bool kAligned, int kWidth, class T>
__device__ void store(const T (&values)[kWidth], T* to) {
  constexpr int kBytes = kWidth * sizeof(T);
  if constexpr (kAligned && kBytes % 16 == 0) {
    uint4 words[kBytes / 16];
    memcpy(words, values, kBytes);
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) reinterpret_cast<uint4*>(to)[i] = words[i];
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to[i] = values[i];
  }
}

// Calls body.template run<kWidth, kCount>(i) for this thread's elements of [0, size): kCount groups of kWidth elements,
// the first at i, each kThreads * Body::kWidth after the last. kWidth is 1 for the few elements past the last whole
// group.
template <class Body>
__device__ void for_each_group(int64_t size, Body& body) {
  constexpr int kWidth = Body::kWidth;
  constexpr int kUnroll = Body::kUnroll;
  constexpr int kStripe = kThreads * kWidth;
  static_assert(kTile % (kStripe * kUnroll) == 0, "a full piece would end in a partial round");
  int64_t i = static_cast<int64_t>(threadIdx.x) * kWidth;
  if constexpr (kUnroll > 1) {
#pragma unroll 1
    for (; i + (kUnroll - 1) * kStripe + kWidth <= size; i += kUnroll * kStripe) body.template run<kWidth, kUnroll>(i);
  }
#pragma unroll 1
  for (; i + kWidth <= size; i += kStripe) body.template run<kWidth, 1>(i);
#pragma unroll 1
  for (; i < size; ++i) body.template run<1, 1>(i);
}

}  // namespace accumkernels::cuda
