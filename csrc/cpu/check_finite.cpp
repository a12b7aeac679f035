#include "../core/args.h"
#include "../core/micro_batch.h"
#include "chunks.h"
#include "spans.h"

namespace accumkernels::cpu {

void check_finite(const CheckFiniteArgs& args, ParallelFor parallel_for) {
  if (args.weight_tensor && is_bad_weight(*args.weight_tensor)) *args.found_inf = 1;
  const Chunks chunks(args.num_gradients, [&](int64_t i) { return args.gradients[i].numel; });
  chunks.run(parallel_for, [&](int64_t chunk) {
    chunks.for_each_span(chunk, [&](int64_t i, int64_t begin, int64_t end) {
      const Gradient& g = args.gradients[i];
      const char* data = static_cast<const char*>(g.data) + begin * size_of(g.dtype);
      const bool wide = g.dtype == DType::kFloat64;
      if (spans().product_is_finite[wide][static_cast<int>(g.dtype)](data, end - begin, 1.0)) return;
      set_flag(&args.flags[g.segment], args.tag);
      raise(args.found_inf);
    });
  });
}

}  // namespace accumkernels::cpu
