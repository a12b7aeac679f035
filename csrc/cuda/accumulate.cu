// accumulate_: gradients of any dtype times weight / loss_scale into a flat fp32 or fp64 buffer, one pass.
#include "../core/micro_batch.h"
#include "launch.h"
#include "reduce.h"
#include "stream.h"
#include "table.h"

namespace accumkernels::cuda {
namespace {

// 16 bytes, so that some 2,000 gradients fit one launch; offset and numel come from the layout on the device.
struct alignas(16) GradientEntry {
  const void* data;
  uint32_t first_block;
  uint32_t packed;  // segment << kSegmentShift | kOverwrite | dtype
};
static_assert(sizeof(GradientEntry) == 16);

constexpr uint32_t kDTypeMask = 3;
constexpr uint32_t kOverwrite = 4;
constexpr int kSegmentShift = 3;
constexpr int64_t kMaxSegments = int64_t{1} << (32 - kSegmentShift);

// What a thread found in its elements.
struct Outcome {
  bool finite_sums;
  bool finite_products;
  Squares squares;
};

// What a block does, found by its first thread. No pointers: read back from shared memory they would be generic ones,
// and every access through them LD and ST instead of LDG and STG.
template <class Buffer>
struct Work {
  int32_t entry;
  int64_t offset;  // of the segment in the buffer
  Piece piece;
  bool dropped;
  Buffer multiplier;
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
  // 96 to 128 bytes in flight per thread, half of that with sums of squares: they take registers too.
  static constexpr int kUnroll = kWideGradient && kWideBuffer && !kSumSquares ? 4 : 2;
  static constexpr int64_t kStripe = kThreads * kWidth;

  const Element* gradient;
  Buffer* main_grad;
  Buffer multiplier;
  bool overwrite;
  Outcome outcome;

  template <int kGroup, int kCount>
  __device__ void run(int64_t i) {
    Element values[kCount][kGroup];
    Buffer totals[kCount][kGroup];
#pragma unroll
    for (int u = 0; u < kCount; ++u) load<kWideGradient>(gradient + i + u * kStripe, values[u]);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      if (overwrite) {
#pragma unroll
        for (int k = 0; k < kGroup; ++k) totals[u][k] = -0.0f;  // -0 plus x is x, -0 included: stores the product
      } else {
        load<kWideBuffer>(main_grad + i + u * kStripe, totals[u]);
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
      store<kWideBuffer>(totals[u], main_grad + i + u * kStripe);
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
  __device__ void run(int64_t i) {
    const Buffer zeros[kGroup] = {};
    store<kWide>(zeros, main_grad + i);
  }
};

template <class Buffer>
__device__ void store_zeros(Buffer* main_grad, int64_t size) {
  with_constant(is_aligned<kWidthOf<Buffer>>(main_grad), [&](auto wide) {
    StoreZeros<Buffer, decltype(wide)::value> body{main_grad};
    for_each_group(size, body);
  });
}

template <bool kSumSquares, class Buffer, class Element>
__device__ Outcome accumulate_piece(const Element* gradient, Buffer* main_grad, const Work<Buffer>& work,
                                    bool overwrite) {
  constexpr int kWidth = kWidthOf<Buffer, Element>;
  return with_constant(is_aligned<kWidth>(gradient), [&](auto wide_gradient) {
    return with_constant(is_aligned<kWidth>(main_grad), [&](auto wide_buffer) {
      Accumulate<Buffer, Element, decltype(wide_gradient)::value, decltype(wide_buffer)::value, kSumSquares> body{
          gradient, main_grad, work.multiplier, overwrite, {true, true, {}}};
      for_each_group(work.piece.size, body);
      return body.outcome;
    });
  });
}

// At most 64 registers, for 4 blocks on an SM: no spills on sm_75 to sm_120 (nvcc 13.0).
template <class Buffer, bool kSumSquares, int32_t kCapacity>
__global__ void __launch_bounds__(kThreads, 4)
    accumulate_kernel(const Table<GradientEntry, kCapacity> __grid_constant__ table,
                      const AccumulateArgs __grid_constant__ args, double* partials) {
  __shared__ Work<Buffer> work;
  if (threadIdx.x == 0) {
    if (table.count > 0) {
      work.entry = table.find(blockIdx.x);
      const int64_t* segment =
          args.layout + 2 * static_cast<int64_t>(table.entries[work.entry].packed >> kSegmentShift);
      work.offset = segment[0];
      work.piece = table.piece(work.entry, segment[1], blockIdx.x);
    }
    const MicroBatch micro_batch = read_micro_batch(args);
    work.dropped = micro_batch.dropped;
    work.multiplier = multiplier<Buffer>(micro_batch);
    if (args.count && blockIdx.x == 0) update_state(micro_batch, args.state);
  }
  __syncthreads();
  Outcome outcome{true, true, {}};
  if (table.count > 0) {
    const GradientEntry& entry = table.entries[work.entry];
    const bool overwrite = (entry.packed & kOverwrite) != 0;
    Buffer* main_grad = static_cast<Buffer*>(args.buffer) + work.offset + work.piece.begin;
    if (!work.dropped) {
      with_elements(entry.data, static_cast<DType>(entry.packed & kDTypeMask), [&](auto* gradient) {
        outcome = accumulate_piece<kSumSquares>(gradient + work.piece.begin, main_grad, work, overwrite);
      });
    } else if (overwrite) {
      store_zeros(main_grad, work.piece.size);
    }
    if (!outcome.finite_sums && args.flags != nullptr) {
      mark_overflow(args.state);
      if (!outcome.finite_products) set_flag(&args.flags[entry.packed >> kSegmentShift], args.tag);
    }
  }
  if constexpr (kSumSquares) {
    const double gradient = block_reduce<Norm::kL2, kThreads>(outcome.squares.gradient);
    __syncthreads();  // block_reduce uses its shared memory again
    const double growth = block_reduce<Norm::kL2, kThreads>(outcome.squares.growth);
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
