// A weight's gradient as the GEMM that adds it: view = view + alpha * grad^T input, bf16 operands, fp32 sums.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace accumkernels::cpu {

// The innermost loops, over operands that are packed in pairs of tokens: element [p, j] holds (x[2p, j], x[2p+1, j]).
struct ProductTile {
  // Of the view: 24 vectors of sums, 4 of inputs and 1 of gradients are in registers.
  static constexpr int kRows = 6, kColumns = 64;

  // packed[p * width + j], zero where columns or tokens end before; source[t * stride + j].
  void (*pack)(const uint16_t* source, int64_t stride, int64_t tokens, int columns, int width, uint32_t* packed);

  // The tile of up to kRows x kColumns whose packed gradients lie grad_width apart, and inputs kColumns.
  void (*run)(const uint32_t* grad, int grad_width, const uint32_t* input, int64_t pairs, float* view, int64_t stride,
              int rows, int columns, float alpha, bool add);
};

// Null where the processor, or what ACCUMKERNELS_CPU leaves of it, cannot multiply bf16.
const ProductTile* product_tile();

// view[i, j] (+)= alpha * sum over t of grad[t, i] * input[t, j]; all three contiguous, add: view is not overwritten.
// The order of summation depends on t alone. Like all products of AVX512_BF16 they take subnormal numbers as zero.
struct ProductArgs {
  float* view;            // [rows, columns]
  const uint16_t* grad;   // [tokens, rows]
  const uint16_t* input;  // [tokens, columns]
  int64_t rows, columns, tokens;
  float alpha;
  bool add;
};

// False, and nothing done, where there is no product_tile().
bool add_product(const ProductArgs& args, ParallelFor parallel_for);

}  // namespace accumkernels::cpu
