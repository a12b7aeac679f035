// A weight's gradient as the GEMM that adds it: view = view + alpha * grad^T input, operands in bf16 or fp32, fp32
// sums.
#pragma once

#include <cstdint>

#include "../core/args.h"

namespace accumkernels::cpu {

// The innermost loops, over operands that are packed into words of 4 bytes: one fp32 element, or the bf16 elements of
// two tokens. Word [s, j] holds x[s, j], or x[2s, j] and above it x[2s + 1, j].
struct ProductTile {
  static constexpr int kRows = 6, kColumns = 64;  // of the view

  int tokens_a_word;

  // packed[s * width + j], zero where columns or tokens end before; source[t * stride + j].
  void (*pack)(const void* source, int64_t stride, int64_t tokens, int columns, int width, uint32_t* packed);

  // The tile of up to kRows x kColumns whose packed gradients lie grad_width apart, and inputs kColumns.
  void (*run)(const uint32_t* grad, int grad_width, const uint32_t* input, int64_t steps, float* view, int64_t stride,
              int rows, int columns, float alpha, bool add);
};

// For operands of kBFloat16 or kFloat32; null where the processor, or what ACCUMKERNELS_CPU leaves of it, has no
// vectors for it.
const ProductTile* product_tile(DType operands);

// view[i, j] (+)= alpha * sum over t of grad[t, i] * input[t, j]; all three contiguous, add: view is not overwritten.
// The order of summation depends on t alone. Like all products of AVX512_BF16 those of bf16 take subnormal numbers as
// zero.
struct ProductArgs {
  float* view;        // [rows, columns]
  const void* grad;   // [tokens, rows]
  const void* input;  // [tokens, columns]
  DType operands;
  int64_t rows, columns, tokens;
  float alpha;
  bool add;
};

// False, and nothing done, where there is no product_tile().
bool add_product(const ProductArgs& args, ParallelFor parallel_for);

}  // namespace accumkernels::cpu
