// Runs the kernels of csrc/cuda without torch or Python, and holds them to reference.cpp.
//
//     check                 every check, one line each; exit status 1 where one fails, 77 where there is no device
//     check NAME ...        those whose names begin with one of these
//     check --list          what is checked
//     check --tight ...     no guard bytes behind arrays: for compute-sanitizer, which sees accesses past an end itself
//     check --time [NAME ...]  bytes per second, as CSV, of kernels whose names begin so: see timing.h. Its options:
//           --elements N       of the large rows
//           --repetitions R    1 is a single launch that nothing precedes, for simulators
//           --csv FILE         writes the rows there too
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "check.h"
#include "timing.h"

namespace {

using namespace check;

constexpr int kNoDevice = 77;

bool wanted(const char* name, const std::vector<const char*>& names) {
  for (const char* start : names) {
    if (std::strncmp(name, start, std::strlen(start)) == 0) return true;
  }
  return names.empty();
}

int run(const std::vector<const char*>& names, bool list) {
  int64_t values = 0, failed = 0, checks = 0;
  for (const auto* group : {&kAccumulate, &kCheckFinite, &kNorm, &kScaledCopy, &kDecide}) {
    for (const Check& check : *group) {
      if (!wanted(check.name, names)) continue;
      std::printf("%s: %s%s", check.name, check.what, list ? "\n" : " ... ");
      std::fflush(stdout);
      if (list) continue;
      const bool tight = tally.tight;
      tally = {};
      tally.tight = tight;
      check.run();
      std::printf("%s, %" PRId64 " values\n", tally.failures == 0 ? "ok" : "FAILED", tally.values);
      values += tally.values;
      failed += tally.failures != 0;
      ++checks;
    }
  }
  if (!list)
    std::printf("%" PRId64 " of %" PRId64 " checks failed, %" PRId64 " values compared\n", failed, checks, values);
  return failed == 0 && (list || checks > 0) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<const char*> names;
  bool list = false, time = false;
  Timing timing;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--list") == 0) {
      list = true;
    } else if (std::strcmp(argv[i], "--tight") == 0) {
      tally.tight = true;
    } else if (std::strcmp(argv[i], "--time") == 0) {
      time = true;
    } else if (std::strcmp(argv[i], "--elements") == 0 && i + 1 < argc) {
      timing.elements = std::atoll(argv[++i]);
    } else if (std::strcmp(argv[i], "--repetitions") == 0 && i + 1 < argc) {
      timing.repetitions = std::atoi(argv[++i]);
    } else if (std::strcmp(argv[i], "--csv") == 0 && i + 1 < argc) {
      timing.csv = argv[++i];
    } else {
      names.push_back(argv[i]);
    }
  }
  int devices = 0;
  if (!list && (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)) {
    std::printf("no CUDA device\n");
    return kNoDevice;
  }
  try {
    if (!time) return run(names, list);
    time_kernels(timing, [&](const char* name) { return wanted(name, names); });
    return tally.failures == 0 ? 0 : 1;
  } catch (const std::exception& error) {  // of what stands in for a device
    std::printf("\nfailed: %s\n", error.what());
    return 1;
  }
}
