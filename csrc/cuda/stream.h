// Streaming through units of a tensor: which lane takes which elements, and how they are loaded and stored.
//
// A group of kWidth elements is one access of at most 16 bytes, and the lanes of a warp take the groups of a unit side
// by side, so that every request moves whole 32-byte sectors: with 32 bytes per lane, each 16-byte store would fill
// half of 32 sectors. Alignment decides only how elements are loaded, at once or one by one, not who takes them: the
// order of a sum does not depend on it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "kernel.h"
#include "units.h"

namespace accumkernels::cuda {

// Elements per access: 16 bytes of the widest type that the loop moves.
template <class... T>
constexpr int kWidthOf = static_cast<int>(kAccessBytes / std::max({sizeof(T)...}));

// What one access moves, for each of its sizes.
template <int kBytes>
struct WordOf;
template <>
struct WordOf<4> {
  using Type = unsigned;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
template <>
struct WordOf<16> {
  using Type = uint4;
};

// Whether groups of so many bytes can be moved at once.
__device__ inline bool is_aligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

template <int kWidth, class T>
__device__ bool is_aligned(const T* pointer) {
  return is_aligned(pointer, kWidth * sizeof(T));
}

template <bool kWide, int kWidth, class T>
__device__ void load(const T* from, T (&values)[kWidth]) {
  if constexpr (kWide && kWidth > 1) {
    using Word = typename WordOf<kWidth * sizeof(T)>::Type;
    // Ordinary accesses, here and in store, but ones that nvcc leaves whole: assignments it took apart into words.
    const Word word = __ldca(reinterpret_cast<const Word*>(from));
    memcpy(values, &word, sizeof(word));
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = from[i];
  }
}

template <bool kWide, int kWidth, class T>
__device__ void store(const T (&values)[kWidth], T* to) {
  if constexpr (kWide && kWidth > 1) {
    using Word = typename WordOf<kWidth * sizeof(T)>::Type;
    Word word;
    memcpy(&word, values, sizeof(word));
    __stwb(reinterpret_cast<Word*>(to), word);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to[i] = values[i];
  }
}

// Calls body.template run<kWidth, kCount>(i, stride) for this lane's elements of these units of a tensor of `numel`
// elements: kCount groups of kWidth elements, the first at i, each `stride` after the last. kWidth is 1 for the few
// elements past the last whole group.
template <class Body>
__device__ void for_each_group(Units units, int64_t numel, Body& body) {
  constexpr int kWidth = Body::kWidth;
  constexpr int kUnroll = Body::kUnroll;
  constexpr int64_t kUnit = kWarp * kWidth;
  const int64_t stride = units.step * kUnit;
  int64_t i = units.first * kUnit + threadIdx.x % kWarp * kWidth;
  if constexpr (kUnroll > 1) {
#pragma unroll 1
    for (; i + (kUnroll - 1) * stride + kWidth <= numel; i += kUnroll * stride) {
      body.template run<kWidth, kUnroll>(i, stride);
    }
  }
#pragma unroll 1
  for (; i + kWidth <= numel; i += stride) body.template run<kWidth, 1>(i, stride);
  // What is left of a last group is within reach of one lane alone.
#pragma unroll 1
  for (; i < numel; ++i) body.template run<1, 1>(i, stride);
}

}  // namespace accumkernels::cuda
