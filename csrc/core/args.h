// What one call of an op works on: raw pointers and numbers, filled by bindings/, consumed by cpu/ and cuda/.
// No torch, no CUDA headers: the same structs serve the library and the host tests.
#pragma once

#include <cstdint>

#include "numeric.h"

namespace accumkernels {

enum class DType : int32_t { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2, kFloat64 = 3 };

AK_HOST_DEVICE static inline int64_t size_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// Indices into the device state tensor (float64[4]) of an accumulator.
enum State : int {
  kWeight = 0,    // sum of the weights of the micro-batches used
  kFoundInf = 1,  // 1.0 once any gradient or weight was not finite
  kUsed = 2,      // micro-batches used: not dropped, weight > 0
  kPoisoned = 3,  // 1.0 once a buffer may hold a value that is not finite: the step must be skipped
};

// Indices into what decide writes (float64[10], and the same in float32).
enum VerdictField : int {
  kEnded = 0,
  kSkip = 1,
  kOverflowed = 2,
  kEmpty = 3,
  kDivisor = 4,
  kNorm = 5,
  kCoefficient = 6,
  kDivideBy = 7,
  kVerdictWeight = 8,
  kVerdictUsed = 9,
  kVerdictCount = 10,
};

// What sq_norm takes in of a micro-batch.
struct Squares {
  double gradient = 0.0;  // sum of squares of the gradients as they came; in sq_norm times weight / loss_scale^2
  double growth = 0.0;    // by which the sum of squares of the buffer's touched elements grew, from 0 at a first touch
};

// One dense gradient, its elements taken in memory order.
struct Gradient {
  const void* data;
  int64_t numel;
  int64_t offset;   // first element of the segment in the buffer, from the host copy of the layout
  int32_t segment;  // row of the layout, index into flags
  DType dtype;
  bool overwrite;  // first touch in the window: store instead of add
};

struct AccumulateArgs {
  void* buffer;
  DType buffer_dtype;  // kFloat32 or kFloat64
  const Gradient* gradients;
  int64_t num_gradients;
  const int64_t* layout;  // device pointer, [segments][2]: offset, numel
  double* state;          // device, float64[4]
  int32_t* flags;         // device, int32[segments], or nullptr: nothing is checked
  int32_t tag;            // stored in flags of a gradient that is not finite
  double weight;
  const double* weight_tensor;  // device scalar that replaces weight, or nullptr
  const float* loss_scale;      // device scalar, or nullptr for 1
  const double* drop;           // device scalar: non-zero drops the micro-batch; or nullptr
  double* sq_norm;              // device, float64[2], see Squares; or nullptr
  bool count;                   // account for the micro-batch in state
};

struct CheckFiniteArgs {
  const Gradient* gradients;  // offset and overwrite are not read
  int64_t num_gradients;
  double* found_inf;  // device scalar, set to 1.0
  int32_t* flags;     // device, int32[segments]
  int32_t tag;
  const double* weight_tensor;  // device scalar: negative or not finite counts as overflow; or nullptr
};

struct Span {
  const void* data;
  int64_t numel;
  DType dtype;
};

enum class Norm : int32_t { kL2 = 0, kInf = 1 };

struct NormArgs {
  const Span* spans;
  int64_t num_spans;
  double* out;  // device scalar: kL2 += sum of squares, kInf = max(out, max |x|), NaN propagates
  Norm norm;
};

struct CopyPair {
  void* output;
  const void* input;
  int64_t numel;
  DType output_dtype;
  DType input_dtype;
};

struct ScaledCopyArgs {
  const CopyPair* pairs;
  int64_t num_pairs;
  const double* divisor;  // device scalar, or nullptr for 1
  double* found_inf;      // device scalar, set to 1.0 when an output is not finite; or nullptr
};

// All pointers on the device; nullptr where an argument is left out.
struct DecideArgs {
  double* verdict;
  float* single;
  const double* state;
  const double* divisor;
  const double* norm;
  const double* max_norm;
  const double* overflow;
};

// The ops over their arguments, on either device; bindings/OP.cpp calls them.

namespace cpu {  // all pointers in host memory

// Runs function(begin, end, context) over [0, end) in pieces, possibly in parallel: torch's stable parallel_for in the
// library, a plain loop in tests.
using ParallelFor = void (*)(int64_t end, void (*function)(int64_t begin, int64_t end, void* context), void* context);

void accumulate(const AccumulateArgs& args, ParallelFor parallel_for);
void check_finite(const CheckFiniteArgs& args, ParallelFor parallel_for);
void decide(const DecideArgs& args);
void norm(const NormArgs& args, ParallelFor parallel_for);
void scaled_copy(const ScaledCopyArgs& args, ParallelFor parallel_for);

// "avx512", "avx2" or "portable": what run-time dispatch chose. ACCUMKERNELS_CPU=avx2|portable in the environment
// lowers it.
const char* instruction_set();

}  // namespace cpu

namespace cuda {  // each launches on `stream` of the current device and returns a cudaError_t as int

// Doubles of device workspace that accumulate (with sq_norm) and norm need at most; allocated by the caller, free to be
// reused by later work on the same stream.
int64_t workspace_size();

int accumulate(const AccumulateArgs& args, double* workspace, void* stream);
int check_finite(const CheckFiniteArgs& args, void* stream);
int decide(const DecideArgs& args, void* stream);
int norm(const NormArgs& args, double* workspace, void* stream);
int scaled_copy(const ScaledCopyArgs& args, void* stream);

// 0 when this device can run the library (driver new enough for the static runtime, an image for its architecture);
// else a cudaError_t, with the reason in message.
int probe(int device, char* message, int size);

}  // namespace cuda

}  // namespace accumkernels
