#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "../../csrc/core/args.h"
#include "../../csrc/cuda/kernel.h"
#include "check.h"
#include "timing.h"

namespace check {
namespace {

using namespace accumkernels;
using namespace accumkernels::cuda;

struct alignas(16) Four {
  float x[4];
};

__global__ void mul_kernel(Four* data, int64_t count, float factor) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  Four value = data[i];
  for (float& x : value.x) x *= factor;
  data[i] = value;
}

__global__ void copy_kernel(const Four* from, Four* to, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) to[i] = from[i];
}

template <class Element>
struct alignas(4 * sizeof(Element)) Group {
  Element x[4];
};

// What accumulate_ does with one gradient: convert, multiply, add, check.
template <class Element>
__global__ void loop_kernel(const Group<Element>* gradient, Four* buffer, int64_t count, float weight, int* flag) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  bool finite = true;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += stride) {
    const Group<Element> value = gradient[i];
    Four total = buffer[i];
    for (int k = 0; k < 4; ++k) {
      total.x[k] += convert<float>(value.x[k]) * weight;
      finite = finite && is_finite(total.x[k]);
    }
    buffer[i] = total;
  }
  if (!finite) *flag = 1;
}

// Device memory for all rows, zeros: neither sums nor flags grow.
struct Memory {
  Array flat, gradients, scalars, flags, workspace;
};

struct Row {
  const char* name;
  int64_t elements;
  int64_t tensors;
  int64_t bytes;
  std::function<int()> launch;
};

// Sizes of a model's parameters that sum to `elements`, or nearly: three small ones to every large one.
std::vector<int64_t> mixed_sizes(int64_t count, int64_t elements) {
  constexpr int64_t kSmall[] = {64, 768, 3072};
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < count; ++i) sizes.push_back(i % 4 < 3 ? kSmall[i % 4] : 0);
  int64_t left = elements;
  for (const int64_t size : sizes) left -= size;
  for (int64_t& size : sizes) {
    if (size == 0) size = std::max<int64_t>(left / (count / 4) / 32 * 32, 32);
  }
  return sizes;
}

// Tensors side by side in the buffer.
class List {
 public:
  List(const Memory& memory, DType dtype, const std::vector<int64_t>& sizes)
      : memory_(memory), layout_("layout", Array::kInt64, 2 * static_cast<int64_t>(sizes.size())) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      const char* data = memory.gradients.device<char>() + elements_ * size_of(dtype);
      gradients_.push_back({data, sizes[i], elements_, static_cast<int32_t>(i), dtype, false});
      layout_.expected<int64_t>()[2 * i] = elements_;
      layout_.expected<int64_t>()[2 * i + 1] = sizes[i];
      elements_ += (sizes[i] + 31) / 32 * 32;
    }
    layout_.upload();
  }
  int64_t bytes(int64_t per_element) const {
    int64_t sum = 0;
    for (const Gradient& gradient : gradients_) sum += gradient.numel * per_element;
    return sum;
  }
  int accumulate() const {
    AccumulateArgs args{};
    args.buffer = memory_.flat.device<void>();
    args.buffer_dtype = DType::kFloat32;
    args.gradients = gradients_.data();
    args.num_gradients = static_cast<int64_t>(gradients_.size());
    args.layout = layout_.device<int64_t>();
    args.state = memory_.scalars.device<double>();
    args.flags = memory_.flags.device<int32_t>();
    args.weight = 1.0;
    args.count = true;
    return cuda::accumulate(args, nullptr, nullptr);
  }
  int check_finite() const {
    CheckFiniteArgs args{};
    args.gradients = gradients_.data();
    args.num_gradients = static_cast<int64_t>(gradients_.size());
    args.found_inf = memory_.scalars.device<double>();
    args.flags = memory_.flags.device<int32_t>();
    return cuda::check_finite(args, nullptr);
  }

 private:
  const Memory& memory_;
  Array layout_;
  std::vector<Gradient> gradients_;
  int64_t elements_ = 0;
};

// Microseconds from before a launch to behind it.
double time_once(const std::function<int()>& launch, const char* name) {
  cudaEvent_t start, stop;
  succeed(cudaEventCreate(&start), "cudaEventCreate");
  succeed(cudaEventCreate(&stop), "cudaEventCreate");
  succeed(cudaEventRecord(start, nullptr), "cudaEventRecord");
  succeed(launch(), name);
  succeed(cudaEventRecord(stop, nullptr), "cudaEventRecord");
  succeed(cudaEventSynchronize(stop), name);
  float milliseconds = 0.0f;
  succeed(cudaEventElapsedTime(&milliseconds, start, stop), "cudaEventElapsedTime");
  succeed(cudaEventDestroy(start), "cudaEventDestroy");
  succeed(cudaEventDestroy(stop), "cudaEventDestroy");
  return 1e3 * static_cast<double>(milliseconds);
}

template <class Element>
int launch_loop(const Memory& memory, int64_t elements, int64_t blocks) {
  const auto* gradient = memory.gradients.device<const Group<Element>>();
  return launch_kernel(loop_kernel<Element>, blocks, kThreads, nullptr, gradient, memory.flat.device<Four>(),
                       elements / 4, 1.0f, memory.flags.device<int>());
}

}  // namespace

void time_kernels(const Timing& timing, const std::function<bool(const char*)>& wanted) {
  const int64_t n = timing.elements / 4096 * 4096, small = 1500 * 64;
  const int64_t room = std::max(n, 4 * small);  // lists of many tensors have small ones whatever n is
  Memory memory{{"buffer", Array::kFloat32, room},
                {"gradients", Array::kFloat32, room},
                {"scalars", Array::kFloat64, 8},
                {"flags", Array::kInt32, 1500},
                {"workspace", Array::kFloat64, workspace_size()}};
  for (Array* array : {&memory.flat, &memory.gradients, &memory.scalars, &memory.flags}) array->upload();
  int processors = 1;
  succeed(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
  const auto loop_blocks = [&](int64_t elements) {
    return std::min<int64_t>((elements / 4 + kThreads - 1) / kThreads, processors * 8);
  };
  Four* flat = memory.flat.device<Four>();
  const Four* from = memory.gradients.device<const Four>();

  std::vector<Row> rows{
      {"copy", n, 1, 8 * n,
       [&] { return launch_kernel(copy_kernel, n / 4 / kThreads, kThreads, nullptr, from, flat, n / 4); }},
      {"mul_", n, 1, 8 * n,
       [&] { return launch_kernel(mul_kernel, n / 4 / kThreads, kThreads, nullptr, flat, n / 4, 1.0f); }},
      {"loop-bf16", n, 1, 10 * n, [&] { return launch_loop<BFloat16>(memory, n, loop_blocks(n)); }},
      {"loop-fp16", n, 1, 10 * n, [&] { return launch_loop<Float16>(memory, n, loop_blocks(n)); }},
      {"loop-fp32", n, 1, 12 * n, [&] { return launch_loop<float>(memory, n, loop_blocks(n)); }},
      {"loop-small", small, 1, 10 * small, [&] { return launch_loop<BFloat16>(memory, small, loop_blocks(small)); }},
  };
  const std::vector<int64_t> whole{n};
  const struct {
    const char* name;
    DType dtype;
    std::vector<int64_t> sizes;
  } lists[] = {
      {"accumulate-bf16", DType::kBFloat16, whole},
      {"accumulate-fp16", DType::kFloat16, whole},
      {"accumulate-fp32", DType::kFloat32, whole},
      {"accumulate-24", DType::kBFloat16, mixed_sizes(24, n)},
      {"accumulate-150", DType::kBFloat16, mixed_sizes(150, n)},
      {"accumulate-small-one", DType::kBFloat16, {small}},
      {"accumulate-small-1500", DType::kBFloat16, std::vector<int64_t>(1500, 64)},
  };
  for (const auto& [name, dtype, sizes] : lists) {
    const auto list = std::make_shared<List>(memory, dtype, sizes);
    const int64_t bytes = list->bytes(8 + size_of(dtype));
    rows.push_back({name, bytes / (8 + size_of(dtype)), static_cast<int64_t>(sizes.size()), bytes,
                    [list] { return list->accumulate(); }});
  }
  const auto checked = std::make_shared<List>(memory, DType::kBFloat16, whole);
  rows.push_back({"check_finite-bf16", n, 1, 2 * n, [checked] { return checked->check_finite(); }});
  const Span span{memory.gradients.device<void>(), n, DType::kFloat32};
  double* out = memory.scalars.device<double>();
  rows.push_back({"norm-fp32", n, 1, 4 * n,
                  [&] { return norm({&span, 1, out, Norm::kL2}, memory.workspace.device<double>(), nullptr); }});
  const CopyPair pair{memory.gradients.device<void>(), flat, n, DType::kBFloat16, DType::kFloat32};
  rows.push_back({"scaled_copy-bf16", n, 1, 6 * n, [&] { return scaled_copy({&pair, 1, nullptr, out}, nullptr); }});

  std::FILE* csv = timing.csv ? std::fopen(timing.csv, "w") : nullptr;
  expect(csv != nullptr || timing.csv == nullptr, std::string("cannot write ") + (timing.csv ? timing.csv : ""));
  const auto write = [&](const std::string& line) {
    for (std::FILE* file : {stdout, csv}) {
      if (file == nullptr) continue;
      std::fprintf(file, "%s\n", line.c_str());
      std::fflush(file);
    }
  };
  write("row,elements,tensors,bytes,us,GB_per_s,fraction_of_copy");
  double copy_rate = 0.0;
  for (const Row& row : rows) {
    if (!wanted(row.name)) continue;
    std::vector<double> times;
    if (timing.repetitions > 1) time_once(row.launch, row.name);
    for (int i = 0; i < timing.repetitions; ++i) times.push_back(time_once(row.launch, row.name));
    std::sort(times.begin(), times.end());
    const double us = times[times.size() / 2];
    const double rate = static_cast<double>(row.bytes) / us * 1e-3;
    if (std::string(row.name) == "copy") copy_rate = rate;
    const std::string fraction = copy_rate > 0.0 ? std::to_string(rate / copy_rate).substr(0, 5) : "";
    char line[200];
    std::snprintf(line, sizeof(line), "%s,%lld,%lld,%lld,%.2f,%.1f,%s", row.name, static_cast<long long>(row.elements),
                  static_cast<long long>(row.tensors), static_cast<long long>(row.bytes), us, rate, fraction.c_str());
    write(line);
  }
  if (csv != nullptr) std::fclose(csv);
}

}  // namespace check
