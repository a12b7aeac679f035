// As cuda_fp16.h, for bfloat16.
#pragma once

#include "cuda_fp16.h"

struct __nv_bfloat16 {
  unsigned short bits;
};

inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return {cuda_host::encode<8, 7>(value, std::nearbyint)}; }
inline __nv_bfloat16 __float2bfloat16_rz(float value) { return {cuda_host::encode<8, 7>(value, std::trunc)}; }
