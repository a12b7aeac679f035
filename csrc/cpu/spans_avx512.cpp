// Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mf16c -mfma; called only where the processor has them.
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of its own _mm512_undefined_*
#endif
#include <immintrin.h>

#include "../core/numeric.h"

namespace accumkernels::cpu {
namespace {

constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

inline __m256i load_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline void store_256(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
inline void store_128(void* p, __m128i v) { _mm_storeu_si128(static_cast<__m128i*>(p), v); }

// To bfloat16 in the low halves of 32-bit lanes: ties to even, NaN to 0x7fc0. Not vcvtneps2bf16: it flushes subnormals.
inline __m512i round_to_bfloat16(__m512 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, _mm512_set1_epi32(0x7fc0));
}

template <class C>
struct Vec;

template <>
struct Vec<float> {
  using Register = __m512;
  static constexpr int kWidth = 16;

  static Register broadcast(float x) { return _mm512_set1_ps(x); }
  static Register load(const float* p) { return _mm512_loadu_ps(p); }
  static Register load(const Float16* p) { return _mm512_cvtph_ps(load_256(p)); }
  static Register load(const BFloat16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_256(p)), 16));
  }
  static Register load(const double* p) {
    const __m256 low = _mm512_cvtpd_ps(_mm512_loadu_pd(p));
    const __m256 high = _mm512_cvtpd_ps(_mm512_loadu_pd(p + 8));
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
  }

  static void store(float* p, Register v) { _mm512_storeu_ps(p, v); }
  static void store(Float16* p, Register v) { store_256(p, _mm512_cvtps_ph(v, kNearest)); }
  static void store(BFloat16* p, Register v) { store_256(p, _mm512_cvtepi32_epi16(round_to_bfloat16(v))); }
  static void stream(float* p, Register v) { _mm512_stream_ps(p, v); }
  static void fence() { _mm_sfence(); }

  static Register mul(Register a, Register b) { return _mm512_mul_ps(a, b); }
  static Register add(Register a, Register b) { return _mm512_add_ps(a, b); }
  static Register sub(Register a, Register b) { return _mm512_sub_ps(a, b); }
  static Register div(Register a, Register b) { return _mm512_div_ps(a, b); }
  static Register bit_or(Register a, Register b) { return _mm512_or_ps(a, b); }
};

template <>
struct Vec<double> {
  using Register = __m512d;
  static constexpr int kWidth = 8;

  static Register broadcast(double x) { return _mm512_set1_pd(x); }
  static Register load(const double* p) { return _mm512_loadu_pd(p); }
  static Register load(const float* p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
  static Register load(const Float16* p) { return _mm512_cvtps_pd(_mm256_cvtph_ps(load_128(p))); }
  static Register load(const BFloat16* p) {
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16);
    return _mm512_cvtps_pd(_mm256_castsi256_ps(bits));
  }

  static void store(double* p, Register v) { _mm512_storeu_pd(p, v); }
  static void store(float* p, Register v) { _mm256_storeu_ps(p, _mm512_cvtpd_ps(v)); }
  static void store(Float16* p, Register v) { store_128(p, _mm256_cvtps_ph(_mm512_cvtpd_ps(v), kNearest)); }
  static void store(BFloat16* p, Register v) {
    const __m512i rounded = round_to_bfloat16(_mm512_castps256_ps512(_mm512_cvtpd_ps(v)));
    store_128(p, _mm256_cvtepi32_epi16(_mm512_castsi512_si256(rounded)));
  }
  static void stream(double* p, Register v) { _mm512_stream_pd(p, v); }
  static void fence() { _mm_sfence(); }

  static Register mul(Register a, Register b) { return _mm512_mul_pd(a, b); }
  static Register add(Register a, Register b) { return _mm512_add_pd(a, b); }
  static Register sub(Register a, Register b) { return _mm512_sub_pd(a, b); }
  static Register div(Register a, Register b) { return _mm512_div_pd(a, b); }
  static Register bit_or(Register a, Register b) { return _mm512_or_pd(a, b); }
  static Register abs(Register a) { return _mm512_abs_pd(a); }
  static Register max(Register a, Register b) { return _mm512_max_pd(a, b); }
  static Register unordered(Register a) {
    return _mm512_castsi512_pd(_mm512_movm_epi64(_mm512_cmp_pd_mask(a, a, _CMP_UNORD_Q)));
  }
};

}  // namespace
}  // namespace accumkernels::cpu

#include "spans_impl.h"

namespace accumkernels::cpu {
constexpr Spans kAvx512Spans = make_spans("avx512");
}  // namespace accumkernels::cpu
#endif
