// Compiled with -mavx2 -mf16c -mfma; called only where the processor has them.
#if defined(__x86_64__)
#include <immintrin.h>

#include "../core/numeric.h"

namespace accumkernels::cpu {
namespace {

constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

inline __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m128i load_64(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
inline void store_128(void* p, __m128i v) { _mm_storeu_si128(static_cast<__m128i*>(p), v); }
inline void store_64(void* p, __m128i v) { _mm_storel_epi64(static_cast<__m128i*>(p), v); }

// To 8 bfloat16: ties to even, NaN to 0x7fc0.
inline __m128i round_to_bfloat16(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i halves = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), _mm256_set1_epi32(0x7fc0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}

template <class C>
struct Vec;

template <>
struct Vec<float> {
  using Register = __m256;
  static constexpr int kWidth = 8;

  static Register broadcast(float x) { return _mm256_set1_ps(x); }
  static Register load(const float* p) { return _mm256_loadu_ps(p); }
  static Register load(const Float16* p) { return _mm256_cvtph_ps(load_128(p)); }
  static Register load(const BFloat16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16));
  }
  static Register load(const double* p) {
    return _mm256_set_m128(_mm256_cvtpd_ps(_mm256_loadu_pd(p + 4)), _mm256_cvtpd_ps(_mm256_loadu_pd(p)));
  }

  static void store(float* p, Register v) { _mm256_storeu_ps(p, v); }
  static void store(Float16* p, Register v) { store_128(p, _mm256_cvtps_ph(v, kNearest)); }
  static void store(BFloat16* p, Register v) { store_128(p, round_to_bfloat16(v)); }
  static void stream(float* p, Register v) { _mm256_stream_ps(p, v); }
  static void fence() { _mm_sfence(); }

  static Register mul(Register a, Register b) { return _mm256_mul_ps(a, b); }
  static Register add(Register a, Register b) { return _mm256_add_ps(a, b); }
  static Register sub(Register a, Register b) { return _mm256_sub_ps(a, b); }
  static Register div(Register a, Register b) { return _mm256_div_ps(a, b); }
  static Register bit_or(Register a, Register b) { return _mm256_or_ps(a, b); }
};

template <>
struct Vec<double> {
  using Register = __m256d;
  static constexpr int kWidth = 4;

  static Register broadcast(double x) { return _mm256_set1_pd(x); }
  static Register load(const double* p) { return _mm256_loadu_pd(p); }
  static Register load(const float* p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
  static Register load(const Float16* p) { return _mm256_cvtps_pd(_mm_cvtph_ps(load_64(p))); }
  static Register load(const BFloat16* p) {
    return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(load_64(p)), 16)));
  }

  static void store(double* p, Register v) { _mm256_storeu_pd(p, v); }
  static void store(float* p, Register v) { _mm_storeu_ps(p, _mm256_cvtpd_ps(v)); }
  static void store(Float16* p, Register v) { store_64(p, _mm_cvtps_ph(_mm256_cvtpd_ps(v), kNearest)); }
  static void store(BFloat16* p, Register v) {
    store_64(p, round_to_bfloat16(_mm256_castps128_ps256(_mm256_cvtpd_ps(v))));
  }
  static void stream(double* p, Register v) { _mm256_stream_pd(p, v); }
  static void fence() { _mm_sfence(); }

  static Register mul(Register a, Register b) { return _mm256_mul_pd(a, b); }
  static Register add(Register a, Register b) { return _mm256_add_pd(a, b); }
  static Register sub(Register a, Register b) { return _mm256_sub_pd(a, b); }
  static Register div(Register a, Register b) { return _mm256_div_pd(a, b); }
  static Register bit_or(Register a, Register b) { return _mm256_or_pd(a, b); }
  static Register abs(Register a) { return _mm256_andnot_pd(_mm256_set1_pd(-0.0), a); }
  static Register max(Register a, Register b) { return _mm256_max_pd(a, b); }
  static Register unordered(Register a) { return _mm256_cmp_pd(a, a, _CMP_UNORD_Q); }
};

}  // namespace
}  // namespace accumkernels::cpu

#include "spans_impl.h"

namespace accumkernels::cpu {
constexpr Spans kAvx2Spans = make_spans("avx2");
}  // namespace accumkernels::cpu
#endif
