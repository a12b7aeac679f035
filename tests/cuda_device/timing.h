// Bytes per second of our kernels beside what any kernel can reach: a copy, torch's mul_, and the loop that one would
// write for accumulate_ without further thought.
#pragma once

#include <cstdint>
#include <functional>

namespace check {

struct Timing {
  int64_t elements = int64_t{1} << 26;  // of every row but those of small tensors
  int repetitions = 20;                 // 1: a single launch, which nothing precedes
  const char* csv = nullptr;            // a file that the rows are written to, too
};

// Prints a line of CSV per row, the median of the repetitions.
void time_kernels(const Timing& timing, const std::function<bool(const char* row)>& wanted);

}  // namespace check
