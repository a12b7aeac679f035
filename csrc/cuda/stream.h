// Streaming through a piece of a tensor: who takes which elements, and how they are loaded and stored.
//
// Thread t takes elements [t * kWidth, (t + 1) * kWidth) of every stripe of kThreads * kWidth elements, kUnroll stripes
// at a time. A group of kWidth elements is one access of at most 16 bytes, so that the lanes of a warp lie side by side
// and every request moves whole 32-byte sectors: with 32 bytes per lane, each 16-byte store would fill half of 32
// sectors. Alignment decides only how elements are loaded, at once or one by one, not who takes them: the order of a
// sum does not depend on it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "blocks.h"
#include "kernel.h"

namespace accumkernels::cuda {

// Elements per access: 16 bytes of the widest type that the loop moves.
template <class... T>
constexpr int kWidthOf = 16 / static_cast<int>(std::max({sizeof(T)...}));

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
    const Word word = *reinterpret_cast<const Word*>(from);
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
    // An ordinary store, but one that nvcc leaves whole: it took a quarter of those by assignment apart into words.
    __stwb(reinterpret_cast<Word*>(to), word);
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
