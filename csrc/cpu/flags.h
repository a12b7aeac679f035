// Flags that several threads may raise at once, all to the same value.
#pragma once

#include <cstdint>

namespace accumkernels::cpu {

inline void raise(double* flag) {
  double one = 1;
  __atomic_store(flag, &one, __ATOMIC_RELAXED);
}

inline void set_flag(int32_t* flag, int32_t tag) { __atomic_store_n(flag, tag, __ATOMIC_RELAXED); }

}  // namespace accumkernels::cpu
