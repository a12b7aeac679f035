// norm_: the sum of squares of a list of tensors, or their largest magnitude, in a fixed order.
#include "../core/args.h"
#include "../core/arithmetic.h"
#include "reduce.h"
#include "square_sum.h"
#include "stream.h"
#include "table.h"

namespace accumkernels::cuda {
namespace {

struct SpanEntry {
  static constexpr int kBlocks = 4;  // that a multiprocessor runs at once

  const void* data;
  int64_t numel;
  uint32_t first_unit;
  DType dtype;
};

template <Norm kNorm, class Element, bool kWide>
struct Reduce {
  static constexpr int kWidth = kWidthOf<Element>;
  static constexpr int kUnroll = kWidth > 4 ? 2 : 4;
  // A largest magnitude is exact in any type, and fp64 is slow on most GPUs.
  using Result = std::conditional_t<kNorm == Norm::kL2 || sizeof(Element) == 8, double, float>;

  const Element* data;
  Result result;

  template <int kGroup, int kCount>
  __device__ void run(int64_t i, int64_t stride) {
    Element values[kCount][kGroup];
#pragma unroll
    for (int u = 0; u < kCount; ++u) load<kWide>(data + i + u * stride, values[u]);
    if constexpr (kNorm == Norm::kL2 && sizeof(Element) < 8) {
      SquareSum<Element> sum;
      for_each(values, [&](Element value) { sum.see(convert<float>(value)); });
      if (sum.in_range()) {
        result += sum.total();
        return;
      }
    }
    for_each(values, [&](Element element) {
      const Result value = convert<Result>(element);
      if constexpr (kNorm == Norm::kL2) {
        result += value * value;
      } else {
        result = larger(result, value < 0 ? -value : value);
      }
    });
  }

  template <int kGroup, int kCount, class See>
  __device__ void for_each(const Element (&values)[kCount][kGroup], See see) {
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int k = 0; k < kGroup; ++k) see(values[u][k]);
    }
  }
};

template <Norm kNorm>
__device__ double reduce_units(const SpanEntry& entry, Units units) {
  double result = 0.0;
  with_elements(entry.data, entry.dtype, [&](auto* data) {
    using Element = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
    with_constant(is_aligned<kWidthOf<Element>>(data), [&](auto wide) {
      Reduce<kNorm, Element, decltype(wide)::value> body{data, 0};
      for_each_group(units, entry.numel, body);
      result = body.result;
    });
  });
  return result;
}

template <Norm kNorm, int32_t kCapacity>
__global__ void __launch_bounds__(kThreads)
    norm_kernel(const Table<SpanEntry, kCapacity> __grid_constant__ table, double* partials) {
  double result = 0.0;
  table.for_each_tensor(
      [&](const SpanEntry& entry, Units units) { result = combine<kNorm>(result, reduce_units<kNorm>(entry, units)); });
  result = block_reduce<kNorm, kThreads>(result);
  if (threadIdx.x == 0) partials[blockIdx.x] = result;
}

template <Norm kNorm>
__global__ void __launch_bounds__(kFinishThreads)
    norm_finish_kernel(const double* partials, int64_t blocks, double* out) {
  const double result = reduce_partials<kNorm>(partials, blocks);
  if (threadIdx.x == 0) *out = combine<kNorm>(*out, result);
}

template <Norm kNorm>
cudaError_t launch_norm(const NormArgs& args, double* partials, void* stream) {
  const auto fill = [](const Span& span, SpanEntry* entry) {
    entry->data = span.data;
    entry->numel = span.numel;
    entry->dtype = span.dtype;
    return unit_of(size_of(span.dtype));
  };
  const auto launch = [&](const auto& table, int64_t blocks, bool) {
    constexpr int32_t kCapacity = std::decay_t<decltype(table)>::kCapacity;
    const cudaError_t error = launch_kernel(norm_kernel<kNorm, kCapacity>, blocks, kThreads, stream, table, partials);
    if (error != cudaSuccess) return error;
    const double* finished = partials;
    return launch_kernel(norm_finish_kernel<kNorm>, 1, kFinishThreads, stream, finished, blocks, args.out);
  };
  return launch_in_tables<SpanEntry>(args.spans, args.num_spans, false, fill, launch);
}

}  // namespace

int norm(const NormArgs& args, double* workspace, void* stream) {
  return args.norm == Norm::kL2 ? launch_norm<Norm::kL2>(args, workspace, stream)
                                : launch_norm<Norm::kInf>(args, workspace, stream);
}

}  // namespace accumkernels::cuda
