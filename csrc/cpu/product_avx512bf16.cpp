// Compiled with -mavx512bf16 and what spans_avx512.cpp is; called only where the processor has them.
#if defined(__x86_64__)
#include "product_vec_avx512.h"

namespace accumkernels::cpu {
namespace {

struct Vec : Avx512Vec {
  using Word = __m512bh;

  static Word words(const uint32_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static Word word(uint32_t x) { return (__m512bh)_mm512_set1_epi32(static_cast<int>(x)); }
  static Register add_product(Register sum, Word g, Word x) { return _mm512_dpbf16_ps(sum, g, x); }
};

}  // namespace
}  // namespace accumkernels::cpu

#include "product_impl.h"

namespace accumkernels::cpu {
namespace {

void pack_pairs(const void* source, int64_t stride, int64_t tokens, int columns, int width, uint32_t* packed) {
  for (int64_t t = 0; t < tokens; t += 2) {
    const uint16_t* even = static_cast<const uint16_t*>(source) + t * stride;
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

}  // namespace

extern const ProductTile kAvx512Bf16Tile;
constexpr ProductTile kAvx512Bf16Tile{2, pack_pairs, run};

}  // namespace accumkernels::cpu
#endif
