// Sums of squares of 16-bit and fp32 numbers, in fp32 arithmetic but to nearly fp64's precision: most GPUs have 1/64 of
// their fp32 rate in fp64, too little to keep up with their memory.
#pragma once

#include "../core/arithmetic.h"
#include "../core/numeric.h"

namespace accumkernels::cuda {

// The sum of the squares of a few elements is high + low: what is lost in rounding high is gathered in low.
//
// With n elements and u = 2^-24, low takes in n errors of products (TwoProduct, exact) of at most u times the product
// and n errors of sums (TwoSum, exact) of at most u times the sum, each addition to low rounded by u again: the result
// is off by less than n (n + 1) u^2 of the sum. That is 1e-12 for the 16 elements that a thread loads at a time, and
// some 1e-14 as rounding errors cancel. The sums of groups are added in fp64.
template <class Element>
class SquareSum {
 public:
  __device__ void see(float x) {
    const float square = multiply(x, x);
    const float total = add(high_, square);
    const float part = add(total, -high_);
    float error = add(add(high_, -add(total, -part)), add(square, -part));
    // A square of 11 bits or fewer fits 24: exact.
    if constexpr (!kIs16Bit<Element>) error = add(error, fmaf(x, x, -square));
    low_ = add(low_, error);
    high_ = total;
  }

  // False for infinities and NaN, where a square may have overflowed, and for sums so small that what underflowed (up
  // to 2^-149 per element) counts; zero among them.
  __device__ bool in_range() const { return high_ >= 0x1p-96f && high_ <= 0x1p126f; }

  __device__ double total() const { return static_cast<double>(high_) + static_cast<double>(low_); }

 private:
  float high_ = 0.0f;
  float low_ = 0.0f;
};

}  // namespace accumkernels::cuda
