// The CPU kernels: same arguments as the CUDA ones, all pointers in host memory.
#pragma once

#include "../core/args.h"

namespace accumkernels::cpu {

// Runs function(begin, end, context) over [0, end) in pieces, possibly in parallel: torch's stable parallel_for in the
// library, a plain loop in tests.
using ParallelFor = void (*)(int64_t end, void (*function)(int64_t begin, int64_t end, void* context), void* context);

void accumulate(const AccumulateArgs& args, ParallelFor parallel_for);
void check_finite(const CheckFiniteArgs& args, ParallelFor parallel_for);
void judge(const JudgeArgs& args);
void norm(const NormArgs& args, ParallelFor parallel_for);
void scaled_copy(const ScaledCopyArgs& args, ParallelFor parallel_for);

// "avx512", "avx2" or "portable": what run-time dispatch chose. ACCUMKERNELS_CPU=avx2|portable in the environment
// lowers it.
const char* instruction_set();

}  // namespace accumkernels::cpu
