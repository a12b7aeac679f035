// Compiled with the flags of spans_avx2.cpp; called only where the processor has what they name.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

namespace accumkernels::cpu {
namespace {

struct Vec {
  using Register = __m256;
  using Word = __m256;
  static constexpr int kWidth = 8, kVectors = 2;  // 12 sums, 2 inputs and 1 gradient of 16 registers

  static Register broadcast(float x) { return _mm256_set1_ps(x); }
  // How many lanes, since a masked store takes some ten times as long as a plain one.
  static int first(int n) { return n; }
  static Register load(int n, const float* p) {
    return n >= kWidth ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, mask(n));
  }
  static void store(int n, float* p, Register v) {
    if (n >= kWidth) {
      _mm256_storeu_ps(p, v);
    } else {
      _mm256_maskstore_ps(p, mask(n), v);
    }
  }
  static __m256i mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static Word words(const uint32_t* p) { return _mm256_castsi256_ps(_mm256_loadu_si256((const __m256i*)p)); }
  static Word word(uint32_t x) { return _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(x))); }
  static Register add_product(Register sum, Word g, Word x) { return _mm256_fmadd_ps(g, x, sum); }
  static Register multiply_add(Register a, Register b, Register c) { return _mm256_fmadd_ps(a, b, c); }
  static Register mul(Register a, Register b) { return _mm256_mul_ps(a, b); }
};

}  // namespace
}  // namespace accumkernels::cpu

#include "product_impl.h"

namespace accumkernels::cpu {
extern const ProductTile kAvx2Fp32Tile;
constexpr ProductTile kAvx2Fp32Tile{1, pack_floats, run};
}  // namespace accumkernels::cpu
#endif
