// The table of tensors that a launch works on, passed by value in the kernel's arguments.
//
// By value, because it is copied at launch: a captured CUDA graph keeps its own, while a table on the device would have
// to stay alive and unchanged for the graph's life.
#pragma once

#include <cuda_runtime.h>

#include "../core/args.h"
#include "blocks.h"
#include "kernel.h"

namespace accumkernels::cuda {

constexpr int kOtherBytes = 256;  // room for the arguments beside the table

// Every launch copies the whole table, however few of its entries are used: there is a short one for most models (GPT-2
// has 148 parameters), 4 KB instead of 32 for accumulate, and a long one that takes what one launch can.
constexpr int32_t kShortTable = 256;
template <class Entry>
constexpr int32_t kLongTable = (kParameterBytes - kOtherBytes) / sizeof(Entry);

template <class Entry, int32_t kEntries>
struct Table {
  static_assert(sizeof(Entry) >= 16, "kMaxPartials counts on it");
  static constexpr int32_t kCapacity = kEntries;

  Entry entries[kCapacity];
  int64_t elements_per_block;
  int32_t count;  // 0 in the one launch of an empty list

  // The entry that a block belongs to, and the part of its tensor that the block takes.
  __device__ int32_t find(uint32_t block) const { return find_entry(entries, count, block); }

  __device__ Piece piece(int32_t entry, int64_t numel, uint32_t block) const {
    return piece_of(numel, elements_per_block, block - entries[entry].first_block);
  }
};

// One partial result per block; a launch has less than one block per tensor over kTargetBlocks.
constexpr int64_t kMaxPartials = kTargetBlocks + kParameterBytes / 16;

template <class Entry, int32_t kCapacity, class Item, class Fill, class Launch>
cudaError_t launch_in_tables_of(const Item* items, int64_t num_items, bool always, Fill fill, Launch launch) {
  Table<Entry, kCapacity> table;
  int64_t next = 0;
  bool first = true;
  do {
    const int64_t start = next;
    int64_t elements = 0;
    table.count = 0;
    for (; next < num_items && table.count < kCapacity; ++next) {
      if (items[next].numel == 0) continue;
      fill(items[next], &table.entries[table.count++]);
      elements += items[next].numel;
    }
    table.elements_per_block = elements_per_block(elements);
    int64_t blocks = 0;
    int32_t entry = 0;
    for (int64_t i = start; i < next; ++i) {
      if (items[i].numel == 0) continue;
      table.entries[entry++].first_block = static_cast<uint32_t>(blocks);
      blocks += blocks_of(items[i].numel, table.elements_per_block);
    }
    if (table.count > 0 || (first && always)) {
      const cudaError_t error = launch(table, blocks > 0 ? blocks : 1, first);
      if (error != cudaSuccess) return error;
      first = false;
    }
  } while (next < num_items);
  return cudaSuccess;
}

// Cuts the list into launches of as many tensors as fit a table: fill(item, &entry), then launch(table, blocks, first).
// Tensors without elements take no entry; if there is nothing else, `always` asks for one launch with an empty table.
template <class Entry, class Item, class Fill, class Launch>
cudaError_t launch_in_tables(const Item* items, int64_t num_items, bool always, Fill fill, Launch launch) {
  int64_t entries = 0;
  for (int64_t i = 0; i < num_items && entries <= kShortTable; ++i) entries += items[i].numel != 0;
  return entries <= kShortTable ? launch_in_tables_of<Entry, kShortTable>(items, num_items, always, fill, launch)
                                : launch_in_tables_of<Entry, kLongTable<Entry>>(items, num_items, always, fill, launch);
}

}  // namespace accumkernels::cuda
