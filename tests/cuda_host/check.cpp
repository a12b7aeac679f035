// Every kernel over a few blocks, for ThreadSanitizer, with results that are easy to know; see build.py.
//
// Inputs reach what threads of several blocks do at once: flags that they raise, and the partial sums that a last
// kernel takes in.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <vector>

#include "../../csrc/cuda/launch.h"
#include "cuda_runtime.h"

using namespace accumkernels;

namespace {

int failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "check failed (seed %llu): %s\n", static_cast<unsigned long long>(cuda_host::settings.seed),
               what);
}

constexpr int64_t kNumel = 9000;  // three blocks

// Ones in two bf16 gradients, 9,000 and 5 of them; the larger has an infinity in its first and last block if asked for.
void accumulate(bool overflow) {
  std::vector<uint16_t> large(kNumel, 0x3f80), small(5, 0x3f80);
  if (overflow) large.front() = large.back() = 0x7f80;
  std::vector<float> buffer(kNumel + 128 + 5, 1.0f);
  const int64_t layout[] = {0, kNumel, kNumel + 128, 5};
  const Gradient gradients[] = {{large.data(), kNumel, 0, 0, DType::kBFloat16, false},
                                {small.data(), 5, kNumel + 128, 1, DType::kBFloat16, true}};
  double state[4] = {}, sq_norm[2] = {};
  int32_t flags[2] = {};
  std::vector<double> workspace(cuda::workspace_size());
  AccumulateArgs args{};
  args.buffer = buffer.data();
  args.buffer_dtype = DType::kFloat32;
  args.gradients = gradients;
  args.num_gradients = 2;
  args.layout = layout;
  args.state = state;
  args.flags = flags;
  args.tag = 7;
  args.weight = 2.0;
  args.sq_norm = sq_norm;
  args.count = true;
  expect(cuda::accumulate(args, workspace.data(), nullptr) == 0, "accumulate launches");
  expect(buffer[1] == 3.0f && buffer[kNumel] == 1.0f && buffer[kNumel + 128] == 2.0f, "accumulate adds and stores");
  expect(state[kWeight] == 2.0 && state[kFoundInf] == overflow, "accumulate updates the state");
  expect(flags[0] == (overflow ? 7 : 0) && flags[1] == 0, "accumulate flags what overflowed");
  if (!overflow) {
    expect(sq_norm[0] == 2.0 * (kNumel + 5), "accumulate sums squares of gradients");
    expect(sq_norm[1] == 8.0 * kNumel + 4.0 * 5, "accumulate sums the growth of the buffer");
  }
}

void check_finite() {
  std::vector<float> data(kNumel, 1.0f);
  data.front() = data[5000] = data.back() = NAN;
  const Gradient gradient{data.data(), kNumel, 0, 1, DType::kFloat32, false};
  double found_inf = 0.0;
  int32_t flags[2] = {};
  CheckFiniteArgs args{};
  args.gradients = &gradient;
  args.num_gradients = 1;
  args.found_inf = &found_inf;
  args.flags = flags;
  args.tag = 3;
  expect(cuda::check_finite(args, nullptr) == 0, "check_finite launches");
  expect(found_inf == 1.0 && flags[0] == 0 && flags[1] == 3, "check_finite finds NaN");
}

void norm(Norm norm, double expected) {
  const std::vector<float> data(kNumel, -2.0f);
  const Span span{data.data(), kNumel, DType::kFloat32};
  std::vector<double> workspace(cuda::workspace_size());
  double out = 1.0;
  expect(cuda::norm({&span, 1, &out, norm}, workspace.data(), nullptr) == 0, "norm launches");
  expect(out == expected, "norm adds up all blocks");
}

// Thirds, rounded to nearest: 2/3 goes up in bf16, 5/3 in fp16.
void scaled_copy() {
  std::vector<float> input(kNumel, 2.0f);
  for (int64_t i = 1; i < kNumel; i += 2) input[i] = 5.0f;
  std::vector<uint16_t> half(kNumel), brain(kNumel);
  const CopyPair pairs[] = {{half.data(), input.data(), kNumel, DType::kFloat16, DType::kFloat32},
                            {brain.data(), input.data(), kNumel, DType::kBFloat16, DType::kFloat32}};
  double divisor = 3.0, found_inf = 0.0;
  expect(cuda::scaled_copy({pairs, 2, &divisor, &found_inf}, nullptr) == 0, "scaled_copy launches");
  expect(half[4097] == 0x3eab && brain[4096] == 0x3f2b, "scaled_copy rounds to nearest");
  divisor = 1e-30;  // 2e30 is no fp16
  cuda::scaled_copy({pairs, 2, &divisor, &found_inf}, nullptr);
  expect(found_inf == 1.0, "scaled_copy finds what it rounded to infinity");
}

}  // namespace

int main() {
  try {
    for (uint64_t seed = 0; seed < 3; ++seed) {
      cuda_host::settings.seed = seed;
      accumulate(false);
      accumulate(true);
      check_finite();
      norm(Norm::kL2, 1.0 + 4.0 * kNumel);
      norm(Norm::kInf, 2.0);
      scaled_copy();
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "check failed: %s\n", error.what());
    return 1;
  }
  return failures == 0 ? 0 : 1;
}
