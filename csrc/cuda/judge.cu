// judge_: a window's verdict, by one thread.
#include "../core/args.h"
#include "../core/judge.h"
#include "kernel.h"

namespace accumkernels::cuda {
namespace {

__global__ void judge_kernel(const JudgeArgs args) { accumkernels::judge(args); }

}  // namespace

int judge(const JudgeArgs& args, void* stream) { return launch_kernel(judge_kernel, 1, 1, stream, args); }

}  // namespace accumkernels::cuda
