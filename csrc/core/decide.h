// What becomes of a window, from its state: by one thread, in double.
#pragma once

#include <cmath>

#include "args.h"
#include "arithmetic.h"

namespace accumkernels {

AK_HOST_DEVICE static inline void decide(const DecideArgs& args) {
  const double weight = args.state[kWeight];
  const bool no_weight = weight == 0.0;
  double divisor = args.divisor == nullptr ? weight : *args.divisor;
  const float in_fp32 = static_cast<float>(divisor);  // what gradients are divided in: 1e-50 would be 0 there
  const bool divides = in_fp32 > 0.0f && is_finite(in_fp32);
  const bool bad = !divides && !(no_weight && args.divisor == nullptr);
  bool skip = args.state[kPoisoned] > 0.0 || bad || no_weight;
  bool found_inf = args.state[kFoundInf] > 0.0 || bad;
  const bool empty = no_weight && !found_inf;
  if (skip) divisor = 1.0;
  if (args.overflow != nullptr && *args.overflow != 0.0 && !empty) skip = found_inf = true;

  const double norm = args.norm == nullptr ? 0.0 : divide(*args.norm, divisor);
  const double limit = args.max_norm == nullptr ? HUGE_VAL : *args.max_norm;
  double coefficient = divide(limit, add(norm, 1e-6));
  if (coefficient > 1.0) coefficient = 1.0;  // NaN stays

  double* verdict = args.verdict;
  verdict[kEnded] = 1.0;
  verdict[kSkip] = skip ? 1.0 : 0.0;
  verdict[kOverflowed] = found_inf ? 1.0 : 0.0;
  verdict[kEmpty] = empty ? 1.0 : 0.0;
  verdict[kDivisor] = divisor;
  verdict[kNorm] = norm;
  verdict[kCoefficient] = coefficient;
  verdict[kDivideBy] = divide(divisor, coefficient);
  verdict[kVerdictWeight] = weight;
  verdict[kVerdictUsed] = args.state[kUsed];
  for (int i = 0; i < kVerdictCount; ++i) args.single[i] = static_cast<float>(verdict[i]);
}

}  // namespace accumkernels
