// How the elements of a list of tensors are dealt out to warps.
//
// A unit is what a warp moves at once: 16 bytes per lane of the widest type at hand. Each tensor is cut into units, of
// which its last may be shorter, and the units of all tensors are numbered in their order. Of `step` warps, warp w
// takes units w, w + step, w + 2 step, ...: together they sweep over memory on a narrow front, as a plain loop over one
// tensor does, and find out once what they have to know before their first unit. A small tensor takes one unit.
#pragma once

#include "../core/numeric.h"

namespace accumkernels {

constexpr int kWarp = 32;
constexpr int64_t kAccessBytes = 16;

// Elements of a unit, by the bytes of the widest type.
AK_HOST_DEVICE static inline int64_t unit_of(int64_t bytes) { return kWarp * kAccessBytes / bytes; }

AK_HOST_DEVICE static inline int64_t units_of(int64_t numel, int64_t unit) { return (numel + unit - 1) / unit; }

// The entry that `unit` belongs to: the last of entries [from, count) whose first_unit is not above it.
template <class Entry>
AK_HOST_DEVICE static inline uint32_t find_entry(const Entry* entries, uint32_t from, uint32_t count, uint32_t unit) {
  uint32_t low = from;
  uint32_t high = count;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (entries[middle].first_unit <= unit) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Units of one tensor, counted within it, that a warp takes: first, first + step, ... before end.
struct Units {
  uint32_t first;
  uint32_t end;
  uint32_t step;
};

}  // namespace accumkernels
