// Arithmetic in which each operation is rounded by itself, and the order of magnitudes, on host and device alike.
//
// A fused multiply-add would round once where torch rounds twice, so the intrinsics keep nvcc from contracting; host
// compilers need -ffp-contract=off, since g++ contracts by default wherever the processor has the instruction.
#pragma once

#include "numeric.h"

namespace accumkernels {

AK_HOST_DEVICE static inline float multiply(float a, float b) {
#ifdef AK_DEVICE_CODE
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

AK_HOST_DEVICE static inline double multiply(double a, double b) {
#ifdef AK_DEVICE_CODE
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

AK_HOST_DEVICE static inline float add(float a, float b) {
#ifdef AK_DEVICE_CODE
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

AK_HOST_DEVICE static inline double add(double a, double b) {
#ifdef AK_DEVICE_CODE
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

// IEEE division, whatever -prec-div says.
AK_HOST_DEVICE static inline float divide(float a, float b) {
#ifdef AK_DEVICE_CODE
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

AK_HOST_DEVICE static inline double divide(double a, double b) {
#ifdef AK_DEVICE_CODE
  return __ddiv_rn(a, b);
#else
  return a / b;
#endif
}

// NaN wins over every number.
template <class T>
AK_HOST_DEVICE static inline T larger(T a, T b) {
  return b > a || b != b ? b : a;
}

}  // namespace accumkernels
