#include "../core/judge.h"

#include "kernels.h"

namespace accumkernels::cpu {

void judge(const JudgeArgs& args) { accumkernels::judge(args); }

}  // namespace accumkernels::cpu
