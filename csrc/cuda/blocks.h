// How the elements of a list of tensors are dealt out to blocks: every block takes one piece of one tensor.
//
// The cut depends on the sizes alone, never on the device or on alignment, and so does the order of every sum.
#pragma once

#include "../core/numeric.h"

namespace accumkernels {

constexpr int64_t kTile = 4096;           // pieces are multiples of this, and keep the alignment of their tensor
constexpr int64_t kTargetBlocks = 16384;  // a launch has about this many blocks at most: 15 waves or more on 132 SMs

// Elements per block for a launch over `total` elements.
AK_HOST_DEVICE static inline int64_t elements_per_block(int64_t total) {
  const int64_t even = (total + kTargetBlocks - 1) / kTargetBlocks;
  const int64_t tiles = (even + kTile - 1) / kTile;
  return (tiles > 0 ? tiles : 1) * kTile;
}

AK_HOST_DEVICE static inline int64_t blocks_of(int64_t numel, int64_t elements_per_block) {
  return (numel + elements_per_block - 1) / elements_per_block;
}

// The entry that `block` belongs to: the last of `count` >= 1 entries whose first_block is not above it.
template <class Entry>
AK_HOST_DEVICE static inline int32_t find_entry(const Entry* entries, int32_t count, uint32_t block) {
  int32_t low = 0;
  int32_t high = count;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    if (entries[middle].first_block <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

struct Piece {
  int64_t begin;
  int64_t size;
};

// The part of a tensor that its block number `index` (counted within the tensor) takes.
AK_HOST_DEVICE static inline Piece piece_of(int64_t numel, int64_t elements_per_block, uint32_t index) {
  const int64_t begin = static_cast<int64_t>(index) * elements_per_block;
  const int64_t rest = numel - begin;
  return {begin, rest < elements_per_block ? rest : elements_per_block};
}

}  // namespace accumkernels
