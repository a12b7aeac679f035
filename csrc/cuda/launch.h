// The CUDA kernels' host side. Every function launches on `stream` of the current device and returns a cudaError_t as
// int.
#pragma once

#include "../core/args.h"

namespace accumkernels::cuda {

// Doubles of device workspace that accumulate (with sq_norm) and norm need at most; allocated by the caller, free to be
// reused by later work on the same stream.
int64_t workspace_size();

int accumulate(const AccumulateArgs& args, double* workspace, void* stream);
int check_finite(const CheckFiniteArgs& args, void* stream);
int judge(const JudgeArgs& args, void* stream);
int norm(const NormArgs& args, double* workspace, void* stream);
int scaled_copy(const ScaledCopyArgs& args, void* stream);

// 0 when this device can run the library (driver new enough for the static runtime, an image for its architecture);
// else a cudaError_t, with the reason in message.
int probe(int device, char* message, int size);

}  // namespace accumkernels::cuda
