// Flags that several threads may raise at once, all to the same value.
#pragma once

#include <cstdint>

#include "numeric.h"

namespace accumkernels {

AK_HOST_DEVICE static inline void raise(double* flag) {
#ifdef __CUDA_ARCH__
  *flag = 1.0;  // a store of 8 aligned bytes is not torn
#else
  double one = 1.0;
  __atomic_store(flag, &one, __ATOMIC_RELAXED);
#endif
}

AK_HOST_DEVICE static inline void set_flag(int32_t* flag, int32_t tag) {
#ifdef __CUDA_ARCH__
  *flag = tag;
#else
  __atomic_store_n(flag, tag, __ATOMIC_RELAXED);
#endif
}

}  // namespace accumkernels
