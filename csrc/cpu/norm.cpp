#include <vector>

#include "../core/args.h"
#include "../core/arithmetic.h"
#include "chunks.h"
#include "spans.h"

namespace accumkernels::cpu {

void norm(const NormArgs& args, ParallelFor parallel_for) {
  const Chunks chunks(args.num_spans, [&](int64_t i) { return args.spans[i].numel; });
  const bool l2 = args.norm == Norm::kL2;
  const auto& of_span = l2 ? spans().sum_of_squares : spans().max_magnitude;

  std::vector<double> partial(chunks.count());
  chunks.run(parallel_for, [&](int64_t chunk) {
    double result = 0;
    chunks.for_each_span(chunk, [&](int64_t i, int64_t begin, int64_t end) {
      const Span& s = args.spans[i];
      const char* data = static_cast<const char*>(s.data) + begin * size_of(s.dtype);
      const double value = of_span[static_cast<int>(s.dtype)](data, end - begin);
      result = l2 ? result + value : larger(result, value);
    });
    partial[chunk] = result;
  });

  if (l2) {
    double sum = 0;
    for (double p : partial) sum += p;
    *args.out += sum;
  } else {
    for (double p : partial) *args.out = larger(*args.out, p);
  }
}

}  // namespace accumkernels::cpu
