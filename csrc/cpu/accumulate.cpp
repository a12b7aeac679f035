#include <cmath>
#include <cstring>
#include <vector>

#include "chunks.h"
#include "flags.h"
#include "kernels.h"
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
        weight_(args.weight_tensor ? *args.weight_tensor : args.weight),
        loss_scale_(args.loss_scale ? *args.loss_scale : 1.0),
        dropped_(args.drop && *args.drop != 0),
        wide_(args.buffer_dtype == DType::kFloat64),
        multiplier_(wide_ ? weight_ / loss_scale_ : static_cast<float>(weight_ / loss_scale_)) {}

  void run(ParallelFor parallel_for) {
    if (args_.count) count();
    const Chunks chunks(args_.num_gradients, [this](int64_t i) { return args_.gradients[i].numel; });
    streams_ = chunks.total() * size_of(args_.buffer_dtype) >= kStreamBytes;
    const bool measures = args_.sq_norm && !dropped_;
    std::vector<Squares> squares(measures ? chunks.count() : 0);
    chunks.run(parallel_for, [&](int64_t chunk) {
      Squares* sums = measures ? &squares[chunk] : nullptr;
      chunks.for_each_span(chunk, [&](int64_t i, int64_t begin, int64_t end) { span(i, begin, end, sums); });
    });
    if (measures) {
      Squares total;
      for (const Squares& s : squares) {
        total.gradient += s.gradient;
        total.growth += s.growth;
      }
      args_.sq_norm[0] += weight_ / (loss_scale_ * loss_scale_) * total.gradient;
      args_.sq_norm[1] += total.growth;
    }
  }

 private:
  void count() {
    const bool bad = !(weight_ >= 0 && std::isfinite(weight_));
    if (!dropped_ && !bad) {
      args_.state[kWeight] += weight_;
      if (weight_ > 0) args_.state[kUsed] += 1;
    }
    if (dropped_ || bad) args_.state[kFoundInf] = 1;
    if (bad && !dropped_) args_.state[kPoisoned] = 1;
  }

  void span(int64_t i, int64_t begin, int64_t end, Squares* squares) const {
    const Gradient& g = args_.gradients[i];
    const int64_t n = end - begin;
    const int64_t size = size_of(args_.buffer_dtype);
    char* buffer = static_cast<char*>(args_.buffer) + (g.offset + begin) * size;
    if (dropped_) {
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
    raise(&args_.state[kFoundInf]);
    raise(&args_.state[kPoisoned]);
    if (!table.product_is_finite[wide_][dtype](gradient, n, multiplier_)) set_flag(&args_.flags[g.segment], args_.tag);
  }

  const AccumulateArgs& args_;
  const double weight_;
  const double loss_scale_;
  const bool dropped_;
  const bool wide_;
  const double multiplier_;
  bool streams_ = false;
};

}  // namespace

void accumulate(const AccumulateArgs& args, ParallelFor parallel_for) { Accumulate(args).run(parallel_for); }

}  // namespace accumkernels::cpu
