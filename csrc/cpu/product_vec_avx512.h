// What Vec of product_impl.h is in AVX-512, whatever the operands.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of its own _mm512_undefined_*
#endif
#include <immintrin.h>

#include <cstdint>

namespace accumkernels::cpu {
namespace {

struct Avx512Vec {
  using Register = __m512;
  static constexpr int kWidth = 16, kVectors = 4;  // 24 sums, 4 inputs and 1 gradient of 32 registers

  static Register broadcast(float x) { return _mm512_set1_ps(x); }
  static __mmask16 first(int n) { return n >= kWidth ? 0xffff : n > 0 ? (1u << n) - 1 : 0; }
  static Register load(__mmask16 mask, const float* p) { return _mm512_maskz_loadu_ps(mask, p); }
  static void store(__mmask16 mask, float* p, Register v) { _mm512_mask_storeu_ps(p, mask, v); }
  static Register multiply_add(Register a, Register b, Register c) { return _mm512_fmadd_ps(a, b, c); }
  static Register mul(Register a, Register b) { return _mm512_mul_ps(a, b); }
};

}  // namespace
}  // namespace accumkernels::cpu
