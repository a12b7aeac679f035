// Compiled with -mavx512bf16 and what spans_avx512.cpp is; called only where the processor has them, and under the same
// rule: everything has internal linkage, nothing of the standard library is called.
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of its own _mm512_undefined_*
#endif
#include <immintrin.h>

#include "product.h"

namespace accumkernels::cpu {
namespace {

constexpr int kVectors = ProductTile::kColumns / 16;

void pack(const uint16_t* source, int64_t stride, int64_t tokens, int columns, int width, uint32_t* packed) {
  for (int64_t t = 0; t < tokens; t += 2) {
    const uint16_t* even = source + t * stride;
    const uint16_t* odd = even + stride;
    const bool last = t + 1 == tokens;
    for (int j = 0; j < width; j += 16) {
      const __mmask16 mask = columns - j >= 16 ? 0xffff : columns > j ? (1u << (columns - j)) - 1 : 0;
      const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, even + j));
      const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(last ? 0 : mask, odd + j));
      _mm512_storeu_si512(packed + j, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
    packed += width;
  }
}

template <int rows>
void tile(const uint32_t* grad, int grad_width, const uint32_t* input, int64_t pairs, float* view, int64_t stride,
          int columns, float alpha, bool add) {
  __m512 sum[rows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_setzero_ps();
  }
  for (int64_t p = 0; p < pairs; ++p) {
    __m512bh x[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) x[v] = (__m512bh)_mm512_loadu_si512(input + p * ProductTile::kColumns + 16 * v);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const __m512bh g = (__m512bh)_mm512_set1_epi32(static_cast<int>(grad[p * grad_width + r]));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], g, x[v]);
    }
  }
  const __m512 factor = _mm512_set1_ps(alpha);
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const int left = columns - 16 * v;
      const __mmask16 mask = left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
      float* out = view + r * stride + 16 * v;
      const __m512 result =
          add ? _mm512_fmadd_ps(sum[r][v], factor, _mm512_maskz_loadu_ps(mask, out)) : _mm512_mul_ps(sum[r][v], factor);
      _mm512_mask_storeu_ps(out, mask, result);
    }
  }
}

void run(const uint32_t* grad, int grad_width, const uint32_t* input, int64_t pairs, float* view, int64_t stride,
         int rows, int columns, float alpha, bool add) {
  static constexpr decltype(&tile<1>) kTiles[] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};
  static_assert(sizeof(kTiles) / sizeof(*kTiles) == ProductTile::kRows);
  kTiles[rows - 1](grad, grad_width, input, pairs, view, stride, columns, alpha, add);
}

}  // namespace

extern const ProductTile kAvx512Bf16Tile;
constexpr ProductTile kAvx512Bf16Tile{pack, run};

}  // namespace accumkernels::cpu
#endif
