// The ops as torch calls them: each takes its arguments off the stack, checks them before anything is written, and
// calls cpu/ or cuda/ by the device of its tensors.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>

namespace accumkernels {

void accumulate_(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs);
void check_finite_(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs);
void norm_(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs);
void judge_(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs);
void scaled_copy_(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs);

}  // namespace accumkernels
