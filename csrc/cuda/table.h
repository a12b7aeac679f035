// The table of tensors that a launch works on, passed by value in the kernel's arguments.
//
// By value, because it is copied at launch: a captured CUDA graph keeps its own, while a table on the device would have
// to stay alive and unchanged for the graph's life.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "../core/args.h"
#include "kernel.h"
#include "units.h"

namespace accumkernels::cuda {

constexpr int kOtherBytes = 256;  // room for the arguments beside the table

// Every launch copies the whole table, however few of its entries are used: there is a short one for most models (GPT-2
// has 148 parameters), 4 KB instead of 32 for accumulate, and a long one that takes what one launch can.
constexpr int32_t kShortTable = 256;
template <class Entry>
constexpr int32_t kLongTable = (kParameterBytes - kOtherBytes) / sizeof(Entry);

template <class Entry, int32_t kEntries>
struct Table {
  static constexpr int32_t kCapacity = kEntries;

  Entry entries[kCapacity];
  uint32_t count;  // 0 in the one launch of an empty list
  uint32_t units;

  // Calls visit(entry, units) for each tensor that this warp has units of.
  template <class Visit>
  __device__ void for_each_tensor(Visit visit) const {
    const uint32_t step = gridDim.x * kWarps;
    uint32_t unit = blockIdx.x * kWarps + threadIdx.x / kWarp;
    uint32_t index = 0;
    while (unit < units) {
      index = find_entry(entries, index, count, unit);
      const Entry& entry = entries[index];
      const uint32_t end = index + 1 < count ? entries[index + 1].first_unit : units;
      visit(entry, Units{unit - entry.first_unit, end - entry.first_unit, step});
      unit += (end - unit + step - 1) / step * step;
    }
  }
};

// Blocks of a launch, each of which has a partial result: as many as run at once. (B200 has 148 multiprocessors.)
constexpr int64_t kMaxBlocks = 4096;

constexpr int64_t kMaxUnits = int64_t{1} << 31;  // of a launch: a terabyte of fp32, and sums of numbers fit 32 bits

// For a kernel of which a multiprocessor runs so many blocks.
inline cudaError_t count_blocks(int blocks_at_once, int64_t* blocks) {
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  *blocks = std::min(int64_t{processors} * blocks_at_once, kMaxBlocks);
  return error;
}

template <class Entry, int32_t kCapacity, class Item, class Fill, class Launch>
cudaError_t launch_in_tables_of(const Item* items, int64_t num_items, bool always, Fill fill, Launch launch) {
  int64_t most_blocks = 0;
  cudaError_t error = count_blocks(Entry::kBlocks, &most_blocks);
  if (error != cudaSuccess) return error;
  Table<Entry, kCapacity> table;
  int64_t next = 0;
  bool first = true;
  do {
    table.count = table.units = 0;
    for (; next < num_items && table.count < kCapacity; ++next) {
      if (items[next].numel == 0) continue;
      Entry& entry = table.entries[table.count++];
      entry.first_unit = table.units;
      const int64_t units = table.units + units_of(items[next].numel, fill(items[next], &entry));
      if (units > kMaxUnits) return cudaErrorInvalidValue;
      table.units = static_cast<uint32_t>(units);
    }
    if (table.count > 0 || (first && always)) {
      const int64_t blocks = std::clamp<int64_t>(units_of(table.units, kWarps), 1, most_blocks);
      error = launch(table, blocks, first);
      if (error != cudaSuccess) return error;
      first = false;
    }
  } while (next < num_items);
  return cudaSuccess;
}

// Cuts the list into launches of as many tensors as fit a table: fill(item, &entry), which returns the
// elements of a unit of this tensor, then launch(table, blocks, first).
// Tensors without elements take no entry; if there is nothing else, `always` asks for one launch with an empty table.
template <class Entry, class Item, class Fill, class Launch>
cudaError_t launch_in_tables(const Item* items, int64_t num_items, bool always, Fill fill, Launch launch) {
  int64_t entries = 0;
  for (int64_t i = 0; i < num_items && entries <= kShortTable; ++i) entries += items[i].numel != 0;
  return entries <= kShortTable ? launch_in_tables_of<Entry, kShortTable>(items, num_items, always, fill, launch)
                                : launch_in_tables_of<Entry, kLongTable<Entry>>(items, num_items, always, fill, launch);
}

}  // namespace accumkernels::cuda
