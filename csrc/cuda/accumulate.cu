// accumulate_: gradients of any dtype times weight / loss_scale into a flat fp32 or fp64 buffer, one pass.
#include "../core/args.h"
#include "../core/micro_batch.h"
#include "reduce.h"
#include "stream.h"
#include "table.h"

namespace accumkernels::cuda {
namespace {

// 16 bytes, so that some 2,000 gradients fit one launch; offset and numel come from the layout on the device.
struct alignas(16) GradientEntry {
  static constexpr int kBlocks = 4;  // that a multiprocessor runs at once

  const void* data;
  uint32_t first_unit;
  uint32_t packed;  // segment << kSegmentShift | kOverwrite | dtype
};
static_assert(sizeof(GradientEntry) == 16);

constexpr uint32_t kDTypeMask = 3;
constexpr uint32_t kOverwrite = 4;
constexpr int kSegmentShift = 3;
constexpr int64_t kMaxSegments = int64_t{1} << (32 - kSegmentShift);

// Units that a warp asks for before it waits. One is 20 to 32 bytes per lane, 20 KB or more on a multiprocessor, which
// hides 1.1 us of an A100's memory; HBM3 wants more. Where that is not needed, a wider front only opens more rows of
// DRAM.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kUnitsAtOnce = 1;
#else
constexpr int kUnitsAtOnce = 2;
#endif

// What a thread found in its elements.
struct Outcome {
  bool finite_sums;
  bool finite_products;
  Squares squares;
};

// What a gradient element adds to the buffer.
template <class Buffer, class Element>
__device__ Buffer contribution(Element gradient, Buffer multiplier) {
  return multiply(convert<Buffer>(gradient), multiplier);
}

// Each side is loaded at once or one by one, by its own alignment.
template <class Buffer, class Element, bool kWideGradient, bool kWideBuffer, bool kSumSquares>
struct Accumulate {
  static constexpr int kWidth = kWidthOf<Buffer, Element>;
  static constexpr int kUnroll = kUnitsAtOnce;

  const Element* gradient;
  Buffer* main_grad;
  Buffer multiplier;
  bool overwrite;
  Outcome outcome;

  template <int kGroup, int kCount>
  __device__ void run(int64_t i, int64_t stride) {
    Element values[kCount][kGroup];
    Buffer totals[kCount][kGroup];
#pragma unroll
    for (int u = 0; u < kCount; ++u) load<kWideGradient>(gradient + i + u * stride, values[u]);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      if (overwrite) {
#pragma unroll
        for (int k = 0; k < kGroup; ++k) totals[u][k] = -0.0f;  // -0 plus x is x, -0 included: stores the product
      } else {
        load<kWideBuffer>(main_grad + i + u * stride, totals[u]);
      }
    }
    bool finite = true;
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        const double before = static_cast<double>(totals[u][k]);
        totals[u][k] = add(totals[u][k], contribution(values[u][k], multiplier));
        finite = finite && is_finite(totals[u][k]);
        if constexpr (kSumSquares) {
          const double value = convert<double>(values[u][k]);
          const double after = static_cast<double>(totals[u][k]);
          outcome.squares.gradient += value * value;
          outcome.squares.growth += after * after - before * before;
        }
      }
      store<kWideBuffer>(totals[u], main_grad + i + u * stride);
    }
    if (!finite) {  // rare, and only here the products matter: one that is not finite leaves no finite sum
      outcome.finite_sums = false;
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
#pragma unroll
        for (int k = 0; k < kGroup; ++k) {
          outcome.finite_products = outcome.finite_products && is_finite(contribution(values[u][k], multiplier));
        }
      }
    }
  }
};

// A dropped first touch.
template <class Buffer, bool kWide>
struct StoreZeros {
  static constexpr int kWidth = kWidthOf<Buffer>;
  static constexpr int kUnroll = 1;

  Buffer* main_grad;

  template <int kGroup, int kCount>
  __device__ void run(int64_t i, int64_t) {
    const Buffer zeros[kGroup] = {};
    store<kWide>(zeros, main_grad + i);
  }
};

template <class Buffer>
__device__ void store_zeros(Buffer* main_grad, int64_t numel, Units units) {
  with_constant(is_aligned<kWidthOf<Buffer>>(main_grad), [&](auto wide) {
    StoreZeros<Buffer, decltype(wide)::value> body{main_grad};
    for_each_group(units, numel, body);
  });
}

template <bool kSumSquares, class Buffer, class Element>
__device__ Outcome accumulate_units(const Element* gradient, Buffer* main_grad, int64_t numel, Units units,
                                    Buffer multiplier, bool overwrite) {
  constexpr int kWidth = kWidthOf<Buffer, Element>;
  return with_constant(is_aligned<kWidth>(gradient), [&](auto wide_gradient) {
    return with_constant(is_aligned<kWidth>(main_grad), [&](auto wide_buffer) {
      Accumulate<Buffer, Element, decltype(wide_gradient)::value, decltype(wide_buffer)::value, kSumSquares> body{
          gradient, main_grad, multiplier, overwrite, {true, true, {}}};
      for_each_group(units, numel, body);
      return body.outcome;
    });
  });
}

template <class Buffer, bool kSumSquares, int32_t kCapacity>
__global__ void __launch_bounds__(kThreads, GradientEntry::kBlocks)
    accumulate_kernel(const Table<GradientEntry, kCapacity> __grid_constant__ table,
                      const AccumulateArgs __grid_constant__ args, double* partials) {
  const MicroBatch micro_batch = read_micro_batch(args);
  if (args.count && blockIdx.x == 0 && threadIdx.x == 0) update_state(micro_batch, args.state);
  const Buffer factor = multiplier<Buffer>(micro_batch);
  Squares squares;
  table.for_each_tensor([&](const GradientEntry& entry, Units units) {
    const uint32_t segment = entry.packed >> kSegmentShift;
    const bool overwrite = (entry.packed & kOverwrite) != 0;
    const int64_t* layout = args.layout + 2 * static_cast<int64_t>(segment);
    Buffer* main_grad = static_cast<Buffer*>(args.buffer) + layout[0];
    const int64_t numel = layout[1];
    if (micro_batch.dropped) {
      if (overwrite) store_zeros(main_grad, numel, units);
      return;
    }
    with_elements(entry.data, static_cast<DType>(entry.packed & kDTypeMask), [&](auto* gradient) {
      const Outcome outcome = accumulate_units<kSumSquares>(gradient, main_grad, numel, units, factor, overwrite);
      if (!outcome.finite_sums && args.flags != nullptr) {
        mark_overflow(args.state);
        if (!outcome.finite_products) set_flag(&args.flags[segment], args.tag);
      }
      if constexpr (kSumSquares) {
        squares.gradient += outcome.squares.gradient;
        squares.growth += outcome.squares.growth;
      }
    });
  });
  if constexpr (kSumSquares) {
    const double gradient = block_reduce<Norm::kL2, kThreads>(squares.gradient);
    __syncthreads();  // block_reduce uses its shared memory again
    const double growth = block_reduce<Norm::kL2, kThreads>(squares.growth);
    if (threadIdx.x == 0) {
      partials[blockIdx.x] = gradient;
      partials[gridDim.x + blockIdx.x] = growth;
    }
  }
}

__global__ void __launch_bounds__(kFinishThreads)
    sq_norm_finish_kernel(const double* partials, int64_t blocks, const AccumulateArgs __grid_constant__ args) {
  Squares squares;
  squares.gradient = reduce_partials<Norm::kL2>(partials, blocks);
  __syncthreads();
  squares.growth = reduce_partials<Norm::kL2>(partials + blocks, blocks);
  if (threadIdx.x == 0) add_sq_norm(read_micro_batch(args), squares, args.sq_norm);
}

template <class Buffer, bool kSumSquares>
cudaError_t launch_accumulate(const AccumulateArgs& args, double* partials, void* stream) {
  const auto fill = [](const Gradient& gradient, GradientEntry* entry) {
    entry->data = gradient.data;
    entry->packed = static_cast<uint32_t>(gradient.segment) << kSegmentShift | (gradient.overwrite ? kOverwrite : 0u) |
                    static_cast<uint32_t>(gradient.dtype);
    return unit_of(std::max<int64_t>(size_of(gradient.dtype), sizeof(Buffer)));
  };
  AccumulateArgs per_launch = args;
  const auto launch = [&](const auto& table, int64_t blocks, bool first) {
    constexpr int32_t kCapacity = std::decay_t<decltype(table)>::kCapacity;
    per_launch.count = args.count && first;
    cudaError_t error = launch_kernel(accumulate_kernel<Buffer, kSumSquares, kCapacity>, blocks, kThreads, stream,
                                      table, per_launch, partials);
    if (kSumSquares && error == cudaSuccess) {
      const double* finished = partials;
      error = launch_kernel(sq_norm_finish_kernel, 1, kFinishThreads, stream, finished, blocks, per_launch);
    }
    return error;
  };
  return launch_in_tables<GradientEntry>(args.gradients, args.num_gradients, args.count || kSumSquares, fill, launch);
}

}  // namespace

int accumulate(const AccumulateArgs& args, double* workspace, void* stream) {
  for (int64_t i = 0; i < args.num_gradients; ++i) {
    if (args.gradients[i].segment >= kMaxSegments) return cudaErrorInvalidValue;
  }
  const bool sum_squares = args.sq_norm != nullptr;
  if (args.buffer_dtype == DType::kFloat64) {
    return sum_squares ? launch_accumulate<double, true>(args, workspace, stream)
                       : launch_accumulate<double, false>(args, workspace, stream);
  }
  return sum_squares ? launch_accumulate<float, true>(args, workspace, stream)
                     : launch_accumulate<float, false>(args, workspace, stream);
}

}  // namespace accumkernels::cuda
