// What the ops mean, written for reading: over pointers of the host, one element after the other.
#pragma once

#include "../../csrc/core/args.h"

namespace reference {

using accumkernels::DType;

// Element i of an array as a double, which holds every value of every type.
double get(DType dtype, const void* array, int64_t i);

// Rounds to the type, to nearest and ties to even.
void put(DType dtype, double value, void* array, int64_t i);

void accumulate(const accumkernels::AccumulateArgs& args);
void check_finite(const accumkernels::CheckFiniteArgs& args);
void norm(const accumkernels::NormArgs& args);
void scaled_copy(const accumkernels::ScaledCopyArgs& args);
void decide(const accumkernels::DecideArgs& args);

}  // namespace reference
