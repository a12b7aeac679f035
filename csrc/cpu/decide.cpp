#include "../core/decide.h"

#include "../core/args.h"

namespace accumkernels::cpu {

void decide(const DecideArgs& args) { accumkernels::decide(args); }

}  // namespace accumkernels::cpu
