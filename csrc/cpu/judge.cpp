#include "../core/judge.h"

#include "../core/args.h"

namespace accumkernels::cpu {

void judge(const JudgeArgs& args) { accumkernels::judge(args); }

}  // namespace accumkernels::cpu
