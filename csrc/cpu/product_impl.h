// The loops of product.h over Vec, which the including file defines for its instruction set:
//
//   Register, Word, kWidth          lanes of fp32; as many packed words; how many those are
//   kVectors                        of sums beside each other: kRows times these, and as many inputs, are in registers
//   broadcast(x)
//   first(n)                        the first n lanes: none below 1, all from kWidth on
//   load(first, p), store(first, p, v)  touch those lanes alone
//   words(p), word(x)               packed inputs; a packed gradient in all lanes
//   add_product(sum, g, x)          sum + g * x
//   multiply_add(a, b, c), mul(a, b)
//
// and pack of ProductTile. Everything has internal linkage, as in spans.h.
#pragma once

#include "product.h"

namespace accumkernels::cpu {
namespace {

constexpr int kColumnsAtOnce = Vec::kVectors * Vec::kWidth;
static_assert(ProductTile::kColumns % kColumnsAtOnce == 0);

// Columns [0, kColumnsAtOnce) of a tile, of which the view may have fewer.
template <int rows>
inline __attribute__((always_inline)) void columns_at_once(const uint32_t* grad, int grad_width, const uint32_t* input,
                                                           int64_t steps, float* view, int64_t stride, int columns,
                                                           float alpha, bool add) {
  typename Vec::Register sum[rows][Vec::kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vec::kVectors; ++v) sum[r][v] = Vec::broadcast(0);
  }
  // On its way while products are made: the view is in no near cache, and of its rows the processor foresees nothing.
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kColumnsAtOnce; j += 16) __builtin_prefetch(view + r * stride + j, 1);
  }
  for (int64_t s = 0; s < steps; ++s) {
    for (int j = 0; j < kColumnsAtOnce; j += 16) __builtin_prefetch(input + (s + 8) * ProductTile::kColumns + j);
    typename Vec::Word x[Vec::kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vec::kVectors; ++v) x[v] = Vec::words(input + s * ProductTile::kColumns + v * Vec::kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const typename Vec::Word g = Vec::word(grad[s * grad_width + r]);
#pragma GCC unroll 4
      for (int v = 0; v < Vec::kVectors; ++v) sum[r][v] = Vec::add_product(sum[r][v], g, x[v]);
    }
  }
  const typename Vec::Register factor = Vec::broadcast(alpha);
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vec::kVectors; ++v) {
      const auto first = Vec::first(columns - v * Vec::kWidth);
      float* out = view + r * stride + v * Vec::kWidth;
      const auto before = add ? Vec::load(first, out) : Vec::broadcast(0);
      Vec::store(first, out, add ? Vec::multiply_add(sum[r][v], factor, before) : Vec::mul(sum[r][v], factor));
    }
  }
}

template <int rows>
void tile(const uint32_t* grad, int grad_width, const uint32_t* input, int64_t steps, float* view, int64_t stride,
          int columns, float alpha, bool add) {
  for (int j = 0; j < columns; j += kColumnsAtOnce) {
    columns_at_once<rows>(grad, grad_width, input + j, steps, view + j, stride, columns - j, alpha, add);
  }
}

void run(const uint32_t* grad, int grad_width, const uint32_t* input, int64_t steps, float* view, int64_t stride,
         int rows, int columns, float alpha, bool add) {
  static constexpr decltype(&tile<1>) kTiles[] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};
  static_assert(sizeof(kTiles) / sizeof(*kTiles) == ProductTile::kRows);
  kTiles[rows - 1](grad, grad_width, input, steps, view, stride, columns, alpha, add);
}

// Of fp32: a word is an element.
[[maybe_unused]] void pack_floats(const void* source, int64_t stride, int64_t tokens, int columns, int width,
                                  uint32_t* packed) {
  const uint32_t* from = static_cast<const uint32_t*>(source);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int j = 0; j < columns; ++j) packed[j] = from[j];
    for (int j = columns; j < width; ++j) packed[j] = 0;
    from += stride;
    packed += width;
  }
}

}  // namespace
}  // namespace accumkernels::cpu
