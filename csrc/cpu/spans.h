// The innermost loops, over one contiguous span each; a table of them per instruction set.
//
// A span's file may use instructions that the processor lacks, so everything in it has internal linkage and nothing of
// the standard library is called there: the linker must not be able to keep its copy of a shared function for all.
#pragma once

#include "../core/args.h"

namespace accumkernels::cpu {

// What accumulate does with an element of the buffer. kStream stores past the caches; the span has to be aligned to 64
// bytes.
enum class Touch : int { kAdd = 0, kStore = 1, kStream = 2 };

struct Spans {
  const char* instruction_set;

  // buffer[i] = buffer[i] + gradient[i] * multiplier, or the product alone. True when every result is finite.
  // The second form also adds to *squares.
  using Accumulate = bool (*)(void* buffer, const void* gradient, int64_t n, double multiplier, Squares* squares);
  Accumulate accumulate[2][4][3];               // [buffer is fp64][gradient][Touch]
  Accumulate accumulate_with_squares[2][4][3];  // likewise

  // True when every gradient[i] * multiplier is finite.
  bool (*product_is_finite[2][4])(const void* gradient, int64_t n, double multiplier);  // [buffer is fp64][gradient]

  double (*sum_of_squares[4])(const void* data, int64_t n);
  double (*max_magnitude[4])(const void* data, int64_t n);  // NaN where there is one

  // output[i] = input[i] / divisor. True when every output is finite.
  bool (*scaled_copy[4][4])(void* output, const void* input, int64_t n, double divisor);  // [output][input]
};

extern const Spans kPortableSpans;
extern const Spans kAvx2Spans;
extern const Spans kAvx512Spans;

// The table for this processor.
const Spans& spans();

}  // namespace accumkernels::cpu
