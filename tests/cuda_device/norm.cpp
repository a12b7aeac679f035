// norm_, against the reference.

#include "check.h"
#include "reference.h"

namespace check {
namespace {

using namespace accumkernels;

constexpr double kTolerance = 2e-12;  // square_sum.h says 1e-12; the rest is another order of fp64 sums

struct Tensor {
  int64_t numel;
  DType dtype;
};

void run(const std::vector<Tensor>& tensors, int shift = 0, double last = 0.0) {
  std::vector<Array> data;
  for (const Tensor& tensor : tensors) {
    data.emplace_back("input", kind_of(tensor.dtype), tensor.numel, shift * size_of(tensor.dtype));
    fill(&data.back(), tensor.dtype, static_cast<uint32_t>(data.size()));
  }
  if (last != 0.0) reference::put(tensors.back().dtype, last, data.back().expected<void>(), tensors.back().numel - 1);
  for (Array& array : data) array.upload();
  for (const Norm norm : {Norm::kL2, Norm::kInf}) {
    Array out = scalar("norm", DType::kFloat64, 0.25);
    Array workspace("workspace", Array::kFloat64, cuda::workspace_size());
    out.upload();
    std::vector<Span> spans;
    const auto arguments = [&](bool device) {
      spans.clear();
      for (size_t i = 0; i < tensors.size(); ++i) {
        const void* at = device ? data[i].device<void>() : data[i].expected<void>();
        spans.push_back({at, tensors[i].numel, tensors[i].dtype});
      }
      double* result = device ? out.device<double>() : out.expected<double>();
      return NormArgs{spans.data(), static_cast<int64_t>(spans.size()), result, norm};
    };
    succeed(cuda::norm(arguments(true), workspace.device<double>(), nullptr), "norm");
    reference::norm(arguments(false));
    out.compare(norm == Norm::kL2 ? kTolerance : 0.0);
  }
}

void dtypes() {
  for (const DType dtype : kDTypes) {
    for (const int shift : {0, 1}) {
      std::vector<Tensor> all;
      for (const int64_t size : kSizes) all.push_back({size, dtype});
      run(all, shift);
    }
    for (const int64_t size : kSizes) run({{size, dtype}});
  }
}

void not_finite() {
  for (const double value : {kInfinity, -kInfinity, kNaN}) {
    for (const DType dtype : kDTypes) run({{7, DType::kFloat32}, {9000, dtype}}, 0, value);
  }
}

// Squares past fp32 on either side.
void range() {
  for (const double value : {1e38, 1e25, 1e-17, 1e-22, 1e-30, 1e-38, 1e-40}) {
    run({{1, DType::kFloat32}}, 0, value);
    run({{4097, DType::kFloat32}}, 0, value);
    run({{4097, DType::kBFloat16}}, 0, value);
  }
}

void many() {
  for (const int64_t count : {256, 257, 1354, 1355, 1800}) {  // tables hold 256 and 1,354
    std::vector<Tensor> tensors;
    for (int64_t i = 0; i < count; ++i) tensors.push_back({i % 5, kDTypes[i % 4]});
    tensors.back().numel = 4;
    run(tensors);
  }
}

void empty() {
  run({});
  run({{0, DType::kFloat32}});
}

void blocks() { run({{9000, DType::kFloat32}, {5000, DType::kBFloat16}}); }

}  // namespace

const std::vector<Check> kNorm = {
    {"norm/dtypes", "sums of squares and largest magnitudes of every dtype and size, aligned or not", dtypes},
    {"norm/not-finite", "infinities and NaN", not_finite},
    {"norm/range", "squares that overflow or underflow fp32", range},
    {"norm/many", "short and long tables, several launches", many},
    {"norm/empty", "lists without elements", empty},
    {"norm/blocks", "partial results of several blocks", blocks},
};

}  // namespace check
