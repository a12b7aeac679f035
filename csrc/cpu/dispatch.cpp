#include <cstdlib>
#include <cstring>

#include "../core/args.h"
#include "spans.h"

namespace accumkernels::cpu {
namespace {

const Spans& choose() {
#if defined(__x86_64__)
  const char* limit = std::getenv("ACCUMKERNELS_CPU");
  if (limit == nullptr) limit = "";
  if (std::strcmp(limit, "portable") == 0) return kPortableSpans;
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && std::strcmp(limit, "avx2") != 0) return kAvx512Spans;
  if (avx2) return kAvx2Spans;
#endif
  return kPortableSpans;
}

}  // namespace

const Spans& spans() {
  static const Spans& chosen = choose();
  return chosen;
}

const char* instruction_set() { return spans().instruction_set; }

}  // namespace accumkernels::cpu
