#include "../core/args.h"
#include "../core/flags.h"
#include "chunks.h"
#include "spans.h"

namespace accumkernels::cpu {

void scaled_copy(const ScaledCopyArgs& args, ParallelFor parallel_for) {
  const double divisor = args.divisor ? *args.divisor : 1.0;
  const Chunks chunks(args.num_pairs, [&](int64_t i) { return args.pairs[i].numel; });
  chunks.run(parallel_for, [&](int64_t chunk) {
    chunks.for_each_span(chunk, [&](int64_t i, int64_t begin, int64_t end) {
      const CopyPair& p = args.pairs[i];
      char* output = static_cast<char*>(p.output) + begin * size_of(p.output_dtype);
      const char* input = static_cast<const char*>(p.input) + begin * size_of(p.input_dtype);
      const auto copy = spans().scaled_copy[static_cast<int>(p.output_dtype)][static_cast<int>(p.input_dtype)];
      if (!copy(output, input, end - begin, divisor) && args.found_inf) raise(args.found_inf);
    });
  });
}

}  // namespace accumkernels::cpu
