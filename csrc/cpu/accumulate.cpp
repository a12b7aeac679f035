#include <cstring>
#include <vector>

#include "../core/args.h"
#include "../core/micro_batch.h"
#include "chunks.h"
#include "spans.h"

namespace accumkernels::cpu {
namespace {

// From this size on a first touch stores past the caches: the buffer would not stay in them anyway, and without it
// every line is read before it is overwritten.
constexpr int64_t kStreamBytes = 32 << 20;
constexpr int64_t kStreamSpan = 4096;  // elements: shorter spans do not repay the fence behind them

class Accumulate {
 public:
  explicit Accumulate(const AccumulateArgs& args)
      : args_(args),
        micro_batch_(read_micro_batch(args)),
        wide_(args.buffer_dtype == DType::kFloat64),
        multiplier_(wide_ ? multiplier<double>(micro_batch_) : multiplier<float>(micro_batch_)) {}

  void run(ParallelFor parallel_for) {
    if (args_.count) update_state(micro_batch_, args_.state);
    const Chunks chunks(args_.num_gradients, [this](int64_t i) { return args_.gradients[i].numel; });
    streams_ = chunks.total() * size_of(args_.buffer_dtype) >= kStreamBytes;
    std::vector<Squares> squares(args_.sq_norm ? chunks.count() : 0);
    chunks.run(parallel_for, [&](int64_t chunk) {
      Squares* sums = args_.sq_norm ? &squares[chunk] : nullptr;
      chunks.for_each_span(chunk, [&](int64_t i, int64_t begin, int64_t end) { span(i, begin, end, sums); });
    });
    if (args_.sq_norm) {
      Squares total;
      for (const Squares& s : squares) {
        total.gradient += s.gradient;
        total.growth += s.growth;
      }
      add_sq_norm(micro_batch_, total, args_.sq_norm);
    }
  }

 private:
  void span(int64_t i, int64_t begin, int64_t end, Squares* squares) const {
    const Gradient& g = args_.gradients[i];
    const int64_t n = end - begin;
    const int64_t size = size_of(args_.buffer_dtype);
    char* buffer = static_cast<char*>(args_.buffer) + (g.offset + begin) * size;
    if (micro_batch_.dropped) {
      if (g.overwrite) std::memset(buffer, 0, n * size);
      return;
    }
    Touch touch = g.overwrite ? Touch::kStore : Touch::kAdd;
    if (g.overwrite && streams_ && n >= kStreamSpan && reinterpret_cast<uintptr_t>(buffer) % 64 == 0) {
      touch = Touch::kStream;
    }
    const char* gradient = static_cast<const char*>(g.data) + begin * size_of(g.dtype);
    const int dtype = static_cast<int>(g.dtype);
    const Spans& table = spans();
    const auto& functions = squares ? table.accumulate_with_squares : table.accumulate;
    const bool finite = functions[wide_][dtype][static_cast<int>(touch)](buffer, gradient, n, multiplier_, squares);
    if (finite || !args_.flags) return;

    // Rare: was it a product, or the sum alone?
    mark_overflow(args_.state);
    if (!table.product_is_finite[wide_][dtype](gradient, n, multiplier_)) set_flag(&args_.flags[g.segment], args_.tag);
  }

  const AccumulateArgs& args_;
  const MicroBatch micro_batch_;
  const bool wide_;
  const double multiplier_;
  bool streams_ = false;
};

}  // namespace

void accumulate(const AccumulateArgs& args, ParallelFor parallel_for) { Accumulate(args).run(parallel_for); }

}  // namespace accumkernels::cpu
