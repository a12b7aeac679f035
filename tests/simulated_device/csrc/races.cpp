#include "races.h"

#include <algorithm>
#include <map>
#include <set>
#include <sstream>

namespace sim {
namespace {

struct Block {
  size_t bytes;
  int device;
  Access made;
  std::set<int> recorded;
  History history;
};

// Freed memory, and an access to it that did not come before the stream to which it returned.
struct Reusable {
  Access made, use;
};

std::map<uintptr_t, Block> blocks;
std::map<int, std::vector<Reusable>> reusable;  // by the stream it was allocated on
std::mutex reports_lock;
std::vector<std::string> reports;
constexpr size_t kReports = 1000;

std::map<uintptr_t, Block>::iterator block_of(uintptr_t address) {
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return blocks.end();
  auto block = std::prev(after);
  return address < block->first + block->second.bytes ? block : blocks.end();
}

// If a cell covers the address, one starts there afterwards.
void split(History& cells, uintptr_t address) {
  auto after = cells.upper_bound(address);
  if (after == cells.begin()) return;
  auto cell = std::prev(after);
  if (cell->first == address || cell->second.end <= address) return;
  Cell rest = cell->second;
  cell->second.end = address;
  cells.emplace(address, std::move(rest));
}

void race(const char* kind, const Access& access, const Access& before, size_t bytes, const Block& block) {
  static std::pair<uint64_t, uint64_t> last;  // a launch that reads and writes the same bytes is one race
  const std::pair<uint64_t, uint64_t> both(access.launch, before.launch);
  if (std::exchange(last, both) == both) return;
  std::ostringstream text;
  text << kind << ": nothing orders " << describe(access) << " after " << describe(before) << "; " << bytes
       << " bytes of " << block.bytes << (block.device < 0 ? " of pinned memory" : "");
  report("race", text.str());
}

// Returns whether all accesses before are ordered; reports the first that is not.
bool ordered(const Cell& cell, uintptr_t begin, bool write, const Access& access, const Clock& known,
             const Block& block) {
  const size_t bytes = cell.end - begin;
  if (!covers(known, cell.write.stream, cell.write.time)) {
    race(write ? "write after write" : "read after write", access, cell.write, bytes, block);
    return false;
  }
  for (const Access& read : cell.reads) {
    if (write && !covers(known, read.stream, read.time)) {
      race("write after read", access, read, bytes, block);
      return false;
    }
  }
  return true;
}

void touch_block(History& history, uintptr_t begin, uintptr_t end, bool write, const Access& access,
                 const Block& block) {
  split(history, begin);
  split(history, end);
  const auto first = history.lower_bound(begin);
  const auto last = history.lower_bound(end);
  const Clock& known = now(access.stream);
  bool good = true;
  for (auto cell = first; cell != last; ++cell) {
    good = good && ordered(cell->second, cell->first, write, access, known, block);
    if (write) continue;
    auto& reads = cell->second.reads;
    const auto same = [&](const Access& read) { return read.stream == access.stream; };
    reads.erase(std::remove_if(reads.begin(), reads.end(), same), reads.end());
    reads.push_back(access);
  }
  if (!write) return;
  history.erase(first, last);
  history.emplace(begin, Cell{end, access, {}});
}

// Each range within its block, with the block.
template <class Each>
void in_blocks(const std::vector<Range>& ranges, const Each& each) {
  for (const Range& range : ranges) {
    const auto block = block_of(range.begin);
    if (block == blocks.end() || range.begin >= range.end) continue;
    each(block->first, block->second, range.begin, std::min(range.end, block->first + block->second.bytes));
  }
}

}  // namespace

void block_made(uintptr_t address, size_t bytes, int device, const Access& by) {
  // Whoever allocates on a stream may be given whatever was freed there, although others may still use it.
  auto freed = reusable.find(by.stream);
  if (device >= 0 && freed != reusable.end()) {
    const Clock& known = now(by.stream);
    for (const auto& [made, use] : freed->second) {
      if (covers(known, use.stream, use.time)) continue;
      report("free", "memory of " + describe(made) + " was freed, and nothing orders its next owner, " + describe(by) +
                         ", after " + describe(use));
    }
    reusable.erase(freed);
  }
  Block block{bytes, device, by, {}, {}};
  block.history.emplace(address, Cell{address + bytes, by, {}});
  blocks.emplace(address, std::move(block));
}

void block_freed(uintptr_t address) {
  const auto found = blocks.find(address);
  if (found == blocks.end()) return;
  const Block& block = found->second;
  const Clock& known = now(block.made.stream);
  std::map<int, Access> latest;  // by stream
  const auto add = [&](const Access& use) {
    if (covers(known, use.stream, use.time)) return;
    for (const int stream : block.recorded) {  // an event is recorded there now, and what came before it is done then
      if (stream == use.stream || covers(now(stream), use.stream, use.time)) return;
    }
    Access& last = latest[use.stream];
    if (last.time < use.time) last = use;
  };
  if (block.device >= 0) {
    for (const auto& [begin, cell] : block.history) {
      add(cell.write);
      for (const Access& read : cell.reads) add(read);
    }
  }
  for (const auto& [stream, use] : latest) reusable[block.made.stream].push_back({block.made, use});
  blocks.erase(found);
}

void block_recorded(uintptr_t address, int stream) {
  const auto block = block_of(address);
  if (block != blocks.end()) block->second.recorded.insert(stream);
}

uint64_t block_owner(uintptr_t address) {
  const auto block = block_of(address);
  return block == blocks.end() ? 0 : block->second.made.launch;
}

void touch(const std::vector<Range>& ranges, bool write, const Access& access) {
  in_blocks(ranges, [&](uintptr_t, Block& block, uintptr_t begin, uintptr_t end) {
    touch_block(block.history, begin, end, write, access, block);
  });
}

void touch(std::map<uintptr_t, History>& recorded, const std::vector<Range>& ranges, bool write, const Access& access) {
  in_blocks(ranges, [&](uintptr_t start, Block& block, uintptr_t begin, uintptr_t end) {
    History& history = recorded[start];
    if (history.empty()) history.emplace(start, Cell{start + block.bytes, Access{}, {}});
    touch_block(history, begin, end, write, access, block);
  });
}

void report(const std::string& kind, const std::string& text) {
  std::lock_guard<std::mutex> guard(reports_lock);
  if (reports.size() < kReports) reports.push_back(kind + "\t" + text);
}

std::vector<std::string> take_reports() {
  std::lock_guard<std::mutex> guard(reports_lock);
  return std::exchange(reports, {});
}

}  // namespace sim
