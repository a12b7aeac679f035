// decide_: a window's verdict, by one thread.
#include "../core/args.h"
#include "../core/decide.h"
#include "kernel.h"

namespace accumkernels::cuda {
namespace {

__global__ void decide_kernel(const DecideArgs args) { accumkernels::decide(args); }

}  // namespace

int decide(const DecideArgs& args, void* stream) { return launch_kernel(decide_kernel, 1, 1, stream, args); }

}  // namespace accumkernels::cuda
