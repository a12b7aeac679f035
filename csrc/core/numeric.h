// 16-bit floating point and conversions between the element types, on host and device alike.
//
// Everything here has internal linkage: the CPU kernels include this header from files compiled for different
// instruction sets, and a shared inline function would let the linker keep the AVX-512 copy for every processor.
#pragma once

#include <math.h>
#include <string.h>

#include <cstdint>
#include <type_traits>

// AK_EMULATED: the code for a GPU, compiled for the host by tests that stand in for CUDA's headers.
#if defined(__CUDACC__) || defined(AK_EMULATED)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define AK_HOST_DEVICE __host__ __device__
#else
#define AK_HOST_DEVICE
#endif
#if defined(__CUDA_ARCH__) || defined(AK_EMULATED)
#define AK_DEVICE_CODE
#endif

namespace accumkernels {

struct Float16 {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

AK_HOST_DEVICE static inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

AK_HOST_DEVICE static inline float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// Widening is exact.
AK_HOST_DEVICE static inline float widen(Float16 value) {
#ifdef AK_DEVICE_CODE
  return __half2float(__ushort_as_half(value.bits));
#else
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  uint32_t bits = magnitude << 13;
  if (magnitude >= 0x7c00u) {
    bits |= 0x7f800000u;  // infinity or NaN
  } else if (magnitude >= 0x0400u) {
    bits += 112u << 23;  // exponent bias 15 -> 127
  } else {
    bits = float_to_bits(static_cast<float>(magnitude) * 0x1p-24f);  // subnormal here, normal as a float
  }
  return bits_to_float(sign | bits);
#endif
}

AK_HOST_DEVICE static inline float widen(BFloat16 value) {
  return bits_to_float(static_cast<uint32_t>(value.bits) << 16);
}

// Narrowing rounds to nearest, ties to even; NaN stays NaN (its payload is not kept).
AK_HOST_DEVICE static inline void narrow(float value, Float16* result) {
#ifdef AK_DEVICE_CODE
  result->bits = __half_as_ushort(__float2half_rn(value));
#else
  const uint32_t bits = float_to_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // 65520, halfway from the largest fp16 to the next power of two
    half = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // 2**-14, the smallest normal fp16
    half = (magnitude - (112u << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  } else {  // floats in [0.5, 1) are 2**-24 apart, just as fp16 subnormals are: the addition rounds
    half = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u;
  }
  result->bits = static_cast<uint16_t>(sign | half);
#endif
}

AK_HOST_DEVICE static inline void narrow(float value, BFloat16* result) {
#ifdef AK_DEVICE_CODE
  result->bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
  const uint32_t bits = float_to_bits(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  result->bits = static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded);
#endif
}

template <class T>
constexpr bool kIs16Bit = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;

// The value as `To`. fp64 reaches 16 bits by way of fp32, as in torch.
template <class To, class From>
AK_HOST_DEVICE static inline To convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (kIs16Bit<From>) {
    return convert<To>(widen(value));
  } else if constexpr (kIs16Bit<To>) {
    To result;
    narrow(static_cast<float>(value), &result);
    return result;
  } else {
    return static_cast<To>(value);
  }
}

AK_HOST_DEVICE static inline bool is_finite(float value) { return fabsf(value) < static_cast<float>(INFINITY); }

AK_HOST_DEVICE static inline bool is_finite(double value) { return fabs(value) < static_cast<double>(INFINITY); }

}  // namespace accumkernels
