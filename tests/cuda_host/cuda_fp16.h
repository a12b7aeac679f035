// CUDA's conversions to and from 16 bits, modelled by arithmetic on doubles: an independent truth for csrc/core.
#pragma once

#include <algorithm>
#include <cmath>

#include "cuda_runtime.h"

namespace cuda_host {

// The bits of a value in a format with so many bits of exponent and mantissa. `round` is nearbyint or trunc.
template <int kExponentBits, int kMantissaBits>
unsigned short encode(double value, double (*round)(double)) {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  constexpr unsigned kInfinity = ((1u << kExponentBits) - 1) << kMantissaBits;
  const unsigned sign = std::signbit(value) ? 0x8000u : 0u;
  if (std::isnan(value)) return 0x7fff;
  if (std::isinf(value)) return static_cast<unsigned short>(sign | kInfinity);
  if (value == 0) return static_cast<unsigned short>(sign);
  int exponent = 0;
  std::frexp(value, &exponent);  // |value| in [2^(exponent - 1), 2^exponent)
  const int lowest = std::max(exponent - 1, 1 - kBias);
  const double steps = round(std::ldexp(std::fabs(value), kMantissaBits - lowest));
  const double bits = std::ldexp(lowest + kBias - 1, kMantissaBits) + steps;
  const double largest = round(0.5) == round(0.75) ? kInfinity - 1 : kInfinity;  // truncation keeps large values finite
  return static_cast<unsigned short>(sign | static_cast<unsigned>(std::min(bits, largest)));
}

template <int kExponentBits, int kMantissaBits>
float decode(unsigned short bits) {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  const int exponent = (bits & 0x7fff) >> kMantissaBits;
  const int mantissa = bits & ((1 << kMantissaBits) - 1);
  double magnitude = std::ldexp(mantissa, 1 - kBias - kMantissaBits);
  if (exponent == (1 << kExponentBits) - 1) {
    magnitude = mantissa == 0 ? HUGE_VAL : std::nan("");
  } else if (exponent > 0) {
    magnitude = std::ldexp(mantissa + (1 << kMantissaBits), exponent - kBias - kMantissaBits);
  }
  return static_cast<float>(bits & 0x8000 ? -magnitude : magnitude);
}

}  // namespace cuda_host

struct __half {
  unsigned short bits;
};

inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __half_as_ushort(__half value) { return value.bits; }
inline float __half2float(__half value) { return cuda_host::decode<5, 10>(value.bits); }
inline __half __float2half_rn(float value) { return {cuda_host::encode<5, 10>(value, std::nearbyint)}; }
inline __half __float2half_rz(float value) { return {cuda_host::encode<5, 10>(value, std::trunc)}; }
