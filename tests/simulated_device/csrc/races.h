// Who read and wrote which bytes last, and what nothing orders.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "clock.h"

namespace sim {

struct Range {
  uintptr_t begin, end;
};

// With the lock held. Blocks of the devices and of pinned memory (device -1); an allocation counts as a write.
void block_made(uintptr_t address, size_t bytes, int device, const Access& by);
void block_freed(uintptr_t address);
void block_recorded(uintptr_t address, int stream);  // record_stream
uint64_t block_owner(uintptr_t address);             // the launch that allocated it; 0: no block is there

// Bytes with the same history: the last write, and the last read of each stream since.
struct Cell {
  uintptr_t end;
  Access write;
  std::vector<Access> reads;
};

// The history of some bytes, by the first address of those that share it.
using History = std::map<uintptr_t, Cell>;

// With the lock held: a launch reads or writes bytes, wherever they belong to a block.
void touch(const std::vector<Range>& ranges, bool write, const Access& access);

// The same among the launches that a graph records, which have not run: a history by block.
void touch(std::map<uintptr_t, History>& recorded, const std::vector<Range>& ranges, bool write, const Access& access);

// Takes no lock but its own. Kinds: "race", "free", "host", "capture".
void report(const std::string& kind, const std::string& text);
std::vector<std::string> take_reports();  // "kind\ttext"

}  // namespace sim
